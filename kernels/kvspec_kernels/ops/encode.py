"""Encode pages into anchor and residual records: all pages and heads of a layer in one launch."""

from __future__ import annotations

import torch

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import Target
from kvspec_kernels.jit import cuda_encode
from kvspec_kernels.jit.encode import encode_kernel
from kvspec_kernels.ops import encoding
from kvspec_kernels.ops.attention_plan import Backend, check_backend
from kvspec_kernels.ops.encoding import EncodeConstants


def encode_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    source: torch.Tensor,
    anchors: torch.Tensor,
    anchor_slots: torch.Tensor,
    residuals: torch.Tensor,
    residual_slots: torch.Tensor,
    settings: CodecSpec,
    target: Target,
    backend: Backend = "auto",
) -> None:
    """Encode pages `source` of k, v into `anchors` and `residuals`, in place.

    Bytes are those of the codec's reference, and for the target exact of reference/exact.py. Only
    meaningless codes may differ: of pages with NaN or infinities, and in uniform4 of groups whose
    range exceeds fp32. Exact residuals always hold every bit. Does not wait for the device, and
    allocates nothing, except at the first call with given settings and sizes. That call makes a
    small table or compiles: capture a CUDA graph after it.

    k, v: [S, P, H, D] bf16, fp16 or fp32, equal strides, the last dimension contiguous.
    source: [N] int32 or int64, pages of k and v; an entry of -1 is skipped.
    anchors: [A, H, anchor bytes] uint8; anchor_slots: [N], the slot of each entry. Slots of entries
        that are not skipped must be valid, and distinct but for slots that nothing reads: the
        device does not check them.
    residuals, residual_slots: likewise, [R, H, residual bytes] and [N].
    backend: "cuda" has the conditions of `cuda_covers`; "auto" takes "cuda" if they hold, else
        "triton".
    Raises FormatError for sizes and settings without records or a kernel. Raises ValueError for
    tensors that do not fit, and for tensors or settings that the back end does not cover.
    """
    check_backend(backend)
    encoding.check_pages(k, v, "k and v")
    _, page_size, num_heads, head_dim = k.shape
    constants = encoding.encode_constants(settings, target, page_size, head_dim, k.dtype)
    encoding.check_records(anchors, constants.anchor_layout, num_heads, "anchors")
    encoding.check_records(residuals, constants.residual_layout, num_heads, "residuals")
    indices = {"source": source, "anchor_slots": anchor_slots, "residual_slots": residual_slots}
    encoding.check_indices(len(source), **indices)
    encoding.check_devices(k.device, anchors=anchors, residuals=residuals, **indices)
    covered = backend != "triton" and cuda_covers(k, v, anchors, residuals, settings, target)
    if backend == "cuda" and not covered:
        raise ValueError(
            "backend 'cuda' needs a device of compute capability 9.0, bf16 or fp16, a head size "
            "that is a multiple of 32, default settings, and rows that start at multiples of 16 "
            "bytes"
        )
    if len(source) == 0 or num_heads == 0:
        return
    arguments = (k, v, source, anchors, anchor_slots, residuals, residual_slots)
    if covered:
        shape = cuda_encode.EncodeShape(settings, target, page_size, head_dim, k.dtype)
        cuda_encode.encode_kernel(shape, k.device).run(*arguments)
    else:
        _run_triton(*arguments, settings, constants)


def cuda_covers(
    k: torch.Tensor,
    v: torch.Tensor,
    anchors: torch.Tensor,
    residuals: torch.Tensor,
    settings: CodecSpec,
    target: Target,
) -> bool:
    """Return True if the CUDA kernel can encode these pages into these pools.

    Conditions: compute capability 9.0; bf16 or fp16; a head size that is a multiple of 32; default
    settings, except for `top` and settings that only decoders use; rows that start at multiples of
    16 bytes.
    """
    shape = cuda_encode.EncodeShape(settings, target, k.shape[1], k.shape[3], k.dtype)
    return cuda_encode.supported(shape, k.device) and cuda_encode.aligned(k, v, anchors, residuals)


def _run_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    source: torch.Tensor,
    anchors: torch.Tensor,
    anchor_slots: torch.Tensor,
    residuals: torch.Tensor,
    residual_slots: torch.Tensor,
    settings: CodecSpec,
    constants: EncodeConstants,
) -> None:
    num_heads = k.shape[2]
    k_pairs, v_pairs = encoding.pairs(k), encoding.pairs(v)
    anchor_words, residual_words = anchors.view(torch.int32), residuals.view(torch.int32)
    encode_kernel[(len(source) * 2 * num_heads,)](
        k_ptr=k_pairs,
        v_ptr=v_pairs,
        source_ptr=source,
        anchors_ptr=anchor_words,
        anchor_slots_ptr=anchor_slots,
        residuals_ptr=residual_words,
        residual_slots_ptr=residual_slots,
        edges_ptr=encoding.encode_table(settings, k.shape[3], k.device),
        one=1,
        num_heads=num_heads,
        stride_page=k_pairs.stride(0),
        stride_head=k_pairs.stride(2),
        stride_anchor=anchor_words.stride(0),
        stride_anchor_head=anchor_words.stride(1),
        stride_residual=residual_words.stride(0),
        stride_residual_head=residual_words.stride(1),
        stride_token=k_pairs.stride(1),
        **constants.launch,
    )
