"""Input of a back end of the attention wrappers, and the checks before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from kvspec_kernels.codecs.coverage import MAX_GROUP, TRITON_ATTENTION
from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import RecordLayout, Target, anchor_layout, residual_layout

Source = Literal["anchor", "int8", "exact"]
# Number format of a draft's products; auto takes the faster one. Verifications always take fp16.
Arithmetic = Literal["auto", "fp16", "int8"]
# Kernels of an operation: CUDA C++ for Hopper, Triton, or CUDA where it covers the operation.
Backend = Literal["auto", "cuda", "triton"]

MAX_QO_LEN = 65
QUERY_DTYPES = tuple(getattr(torch, name) for name in TRITON_ATTENTION.dtypes)
# A 16-byte load must not straddle two records.
ALIGNMENT = 16


class Tail(NamedTuple):
    """Full-precision tokens after the encoded past, in the KV dtype.

    window_k, window_v: [num_slots, page_size, num_kv_heads, head_dim], the last dimension
    contiguous. Request b's tail is the first lens[b] tokens of pages
    indices[indptr[b] : indptr[b + 1]], the last of which are its query tokens.
    indptr [batch_size + 1], indices and lens [batch_size] are int32, contiguous.
    """

    window_k: torch.Tensor
    window_v: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    lens: torch.Tensor


class Records(NamedTuple):
    """Encoded pages of a layer: anchors [num_pages, H, nbytes], residuals [num_slots, H, nbytes],
    both uint8, and residual_slots [num_pages] int32. A source may leave out tensors
    that it does not use."""

    anchors: torch.Tensor | None = None
    residuals: torch.Tensor | None = None
    residual_slots: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything that is known before a run. Every run reads the index tensors on the device.

    qo_indptr: None if every request has max_qo_len query tokens, which follow one another. indices:
    [num_indices], or for the source "anchor" also [num_indices, num_kv_heads], where -1 means no
    page.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    qo_indptr: torch.Tensor | None
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    settings: CodecSpec
    source: Source
    q_dtype: torch.dtype
    sm_scale: float
    max_qo_len: int
    num_sms: int
    arithmetic: Arithmetic = "auto"
    # Allows a separate kernel to join the partial results of a request's blocks, if the likely
    # numbers of requests and tokens favour it. If False, compiled code does not depend on them.
    may_join_separately: bool = True
    # Likely number of requests of a run, at most batch_size; None: batch_size.
    expected_batch: int | None = None
    # False if no request ever has pages, as in attention to the tail alone.
    has_past: bool = True
    # If given, the bits of a row depend only on its query and on the KV that it sees. Most pages of
    # all requests of a run together, past and tail.
    deterministic_pages: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "max_qo_len", "num_sms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_qo_heads % self.num_kv_heads or self.group > MAX_GROUP:
            raise ValueError(
                f"num_qo_heads must be 1 to {MAX_GROUP} times num_kv_heads, "
                f"got {self.num_qo_heads} and {self.num_kv_heads}"
            )
        if self.expected_batch is not None and not 1 <= self.expected_batch <= self.batch_size:
            raise ValueError(
                f"expected_batch must be 1 to {self.batch_size}, got {self.expected_batch}"
            )
        if self.max_qo_len > MAX_QO_LEN:
            raise ValueError(f"max_qo_len must be at most {MAX_QO_LEN}, got {self.max_qo_len}")
        if self.q_dtype not in QUERY_DTYPES:
            raise ValueError(f"q_dtype must be one of {_names(QUERY_DTYPES)}, got {self.q_dtype}")
        if self.arithmetic not in get_args(Arithmetic):
            raise ValueError(f"arithmetic must be auto, fp16 or int8, got {self.arithmetic!r}")
        if self.indptr.ndim != 1 or len(self.indptr) < 2:
            raise ValueError(
                f"indptr must have shape [batch_size + 1], got {list(self.indptr.shape)}"
            )
        check_index("indptr", self.indptr, self.device, self.batch_size + 1)
        if self.has_lists_by_head:
            shape = (None, self.num_kv_heads)
            check_tensor("indices", self.indices, shape, torch.int32, self.device)
        else:
            check_index("indices", self.indices, self.device)
        check_index("last_page_len", self.last_page_len, self.device, self.batch_size)
        if self.qo_indptr is not None:
            check_index("qo_indptr", self.qo_indptr, self.device, self.batch_size + 1)
        # Both raise FormatError, a ValueError, for sizes without a record layout.
        assert self.anchor_layout.nbytes
        assert self.source == "anchor" or self.residual_layout.nbytes

    @property
    def has_lists_by_head(self) -> bool:
        """True if each KV head of a draft reads its own list of pages."""
        return self.source == "anchor" and self.indices.ndim == 2

    @property
    def batch_size(self) -> int:
        return len(self.indptr) - 1

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def device(self) -> torch.device:
        return self.indptr.device

    @property
    def anchor_layout(self) -> RecordLayout:
        return anchor_layout(self.settings, self.page_size, self.head_dim)

    @property
    def residual_layout(self) -> RecordLayout:
        target: Target = "exact" if self.source == "exact" else "int8"
        sizes = (self.page_size, self.head_dim, self.q_dtype)
        return residual_layout(self.settings, target, *sizes)

    def check_run(
        self,
        q: torch.Tensor,
        records: Records,
        tail: Tail | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Raise ValueError unless the tensors of a run fit the plan."""
        heads = (self.num_qo_heads, self.head_dim)
        num_tokens = self.batch_size * self.max_qo_len if self.qo_indptr is None else len(q)
        check_tensor("q", q, (num_tokens, *heads), self.q_dtype, self.device)
        check_tensor("out", out, (num_tokens, *heads), self.q_dtype, self.device)
        lse_shape = (num_tokens, self.num_qo_heads)
        check_tensor("lse", lse, lse_shape, torch.float32, self.device)
        if self.source != "exact":
            self._check_records("anchors", records.anchors, self.anchor_layout.nbytes)
        if self.source != "anchor":
            self._check_records("residuals", records.residuals, self.residual_layout.nbytes)
            if records.residual_slots is None:
                raise ValueError(f"residual_slots must be given for the {self.source} source")
            check_index("residual_slots", records.residual_slots, self.device)
        if tail is not None:
            page = (self.page_size, self.num_kv_heads, self.head_dim)
            for name, window in (("window_k", tail.window_k), ("window_v", tail.window_v)):
                check_tensor(f"tail.{name}", window, (None, *page), self.q_dtype, self.device)
            check_index("tail.indptr", tail.indptr, self.device, self.batch_size + 1)
            check_index("tail.indices", tail.indices, self.device)
            check_index("tail.lens", tail.lens, self.device, self.batch_size)

    def _check_records(self, name: str, records: torch.Tensor | None, nbytes: int) -> None:
        if records is None:
            raise ValueError(f"{name} must be given for the {self.source} source")
        shape = (None, self.num_kv_heads, nbytes)
        check_tensor(name, records, shape, torch.uint8, self.device)
        strides = records.stride()
        if records.data_ptr() % ALIGNMENT or any(stride % ALIGNMENT for stride in strides[:-1]):
            raise ValueError(
                f"{name} must have a start and strides at multiples of {ALIGNMENT} bytes, "
                f"got strides {strides}"
            )


def check_backend(backend: str) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be auto, cuda or triton, got {backend!r}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ValueError unless `tensor` has this shape, dtype and device and is contiguous in its
    last dimension. None in `shape` means any size."""
    fits = tensor.ndim == len(shape) and all(
        want in (None, got) for got, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} must have shape {_shape_text(shape)}, got {_shape_text(tensor.shape)}"
        )
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, like indptr, got {tensor.device}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}"
        )


def check_index(
    name: str, tensor: torch.Tensor, device: torch.device, size: int | None = None
) -> None:
    check_tensor(name, tensor, (size,), torch.int32, device)


def _shape_text(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))
