"""Launch cuda/encode.cu: the Hopper back end of encoding, for 4-bit anchors."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvspec_kernels.codecs.coverage import CUDA_ENCODE
from kvspec_kernels.codecs.kernels import CudaEncode
from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import RECORD_ALIGNMENT, Target, anchor_layout
from kvspec_kernels.jit import nvrtc
from kvspec_kernels.jit.cuda_attention import (
    BLOCK_RESERVED,
    MULTIPROCESSOR_REGISTERS,
    MULTIPROCESSOR_SHARED,
)

# Values that a thread encodes, unless MAX_WARPS gives it more.
THREAD_ELEMENTS = 64
MAX_WARPS = 16
# Nothing spills, and a multiprocessor holds 8 blocks of 4 warps.
THREAD_REGISTERS = 64


@dataclass(frozen=True)
class EncodeShape:
    """Codec, target, sizes and dtype for which a kernel is compiled."""

    settings: CodecSpec
    target: Target
    page_size: int
    head_dim: int
    dtype: torch.dtype


@functools.lru_cache(maxsize=64)
def supported(shape: EncodeShape, device: torch.device) -> bool:
    """Return True if the kernel covers this shape. Cached: every layer of every prefill asks."""
    return (
        nvrtc.is_hopper(device)
        and CUDA_ENCODE.takes(
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            group=1,
            dtype=str(shape.dtype).removeprefix("torch."),
        )
        and shape.settings.cuda_encode(shape.page_size) is not None
    )


def aligned(*tensors: torch.Tensor) -> bool:
    """Return True if all rows start at multiples of 16 bytes, as the kernel needs. The tensors'
    last dimension must be contiguous."""
    return all(
        tensor.data_ptr() % RECORD_ALIGNMENT == 0
        and all(s * tensor.itemsize % RECORD_ALIGNMENT == 0 for s in tensor.stride()[:-1])
        for tensor in tensors
    )


class EncodeKernel:
    """Encode kernel of one shape on one device. Holds no state besides the compiled code."""

    def __init__(self, shape: EncodeShape, device: torch.device) -> None:
        self._shared_bytes = shared_bytes(shape)
        self._threads = 32 * num_warps(shape)
        (self._encode,) = nvrtc.load("encode.cu", ("encode_pages",), encode_defines(shape), device)
        self._encode.allow_shared_memory(self._shared_bytes)

    def run(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        source: torch.Tensor,
        anchors: torch.Tensor,
        anchor_slots: torch.Tensor,
        residuals: torch.Tensor,
        residual_slots: torch.Tensor,
    ) -> None:
        """Enqueue on the current stream. Arguments are those of `ops/encode.py`; k, v, anchors and
        residuals must be `aligned`."""
        num_heads = k.shape[2]
        indices = (source, anchor_slots, residual_slots)
        wide = sum((index.dtype == torch.int64) << bit for bit, index in enumerate(indices))
        self._encode.launch(
            len(source) * 2 * num_heads,
            self._threads,
            (
                k,
                v,
                *_byte_strides(k, (0, 1, 2)),
                *indices,
                ctypes.c_int(wide),
                anchors,
                *_byte_strides(anchors, (0, 1)),
                residuals,
                *_byte_strides(residuals, (0, 1)),
                ctypes.c_int(num_heads),
            ),
            self._shared_bytes,
        )


@functools.lru_cache(maxsize=64)
def encode_kernel(shape: EncodeShape, device: torch.device) -> EncodeKernel:
    """Return the kernel of a shape, compiled once for each process and device."""
    return EncodeKernel(shape, device)


def encode_defines(shape: EncodeShape) -> dict[str, int | str]:
    """Return the constants that cuda/encode.cu is compiled with."""
    layout = anchor_layout(shape.settings, shape.page_size, shape.head_dim)
    codec = _codec(shape)
    needed = shared_bytes(shape)
    threads = 32 * num_warps(shape)
    blocks = min(
        MULTIPROCESSOR_REGISTERS // (THREAD_REGISTERS * threads),
        MULTIPROCESSOR_SHARED // (needed + BLOCK_RESERVED),
    )
    return {
        **codec.defines,
        "EXACT": int(shape.target == "exact"),
        "KV_BF16": int(shape.dtype == torch.bfloat16),
        "PAGE_SIZE": shape.page_size,
        "HEAD_DIM": shape.head_dim,
        "K_CHUNK": codec.chunks[0],
        "V_CHUNK": codec.chunks[1],
        "WARPS": num_warps(shape),
        "BLOCKS": max(blocks, 1),
        "SHARED_BYTES": needed,
        "K_CODES": layout["k_codes"].offset,
        "K_METADATA": layout[f"k_{codec.first_metadata}"].offset,
        "V_CODES": layout["v_codes"].offset,
        "V_METADATA": layout[f"v_{codec.first_metadata}"].offset,
    }


def num_warps(shape: EncodeShape) -> int:
    """Return the warps of a block, which encodes K or V of one page and head."""
    warps = -(-shape.page_size * shape.head_dim // (32 * THREAD_ELEMENTS))
    return min(warps, MAX_WARPS)


def shared_bytes(shape: EncodeShape) -> int:
    """Return the bytes of shared memory of a block: values, prepared numbers and metadata of each
    channel or token, and maxima."""
    codec = _codec(shape)
    tokens = shape.page_size if codec.per_token else 0
    entries = max(tokens, shape.page_size // min(codec.chunks) * shape.head_dim)
    values = shape.page_size * (2 * shape.head_dim + 16)
    # One maximum per warp for log4, and room for the one-element arrays that a codec does not use.
    return -(-(values + entries * codec.entry_bytes + 4 * MAX_WARPS + 16) // 16) * 16


def _codec(shape: EncodeShape) -> CudaEncode:
    codec = shape.settings.cuda_encode(shape.page_size)
    assert codec is not None, f"cuda/encode.cu does not cover {shape.settings}"
    return codec


def _byte_strides(tensor: torch.Tensor, dimensions: Sequence[int]) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(tensor.stride(d) * tensor.itemsize) for d in dimensions]
