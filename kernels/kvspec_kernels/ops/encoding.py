"""Constants of the encode kernels, and checks of the pages and records of encode and append."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvspec_kernels import formats
from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import FormatError, RecordLayout, Target
from kvspec_kernels.jit.functions import kernel_function
from kvspec_kernels.reference import fragments
from kvspec_kernels.reference.codec import kernel_reference_of

KV_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Kernels load two channels as one integer.
PAIR_DTYPES = {2: torch.int32, 4: torch.int64}
INDEX_DTYPES = (torch.int32, torch.int64)

CHUNK_STEP = 16
TABLE_SLOTS = 128
MAX_WARPS = 16


@dataclass(frozen=True)
class EncodeConstants:
    """Layouts of the records, and keyword arguments of `jit/encode.py` that follow from them."""

    anchor_layout: RecordLayout
    residual_layout: RecordLayout
    launch: Mapping[str, object]


@functools.lru_cache(maxsize=64)
def encode_constants(
    settings: CodecSpec, target: Target, page_size: int, head_dim: int, dtype: torch.dtype
) -> EncodeConstants:
    """Return the constants for these settings and sizes. Raises FormatError if no layout or kernel
    exists for them."""
    anchor_layout = formats.anchor_layout(settings, page_size, head_dim)
    residual_layout = formats.residual_layout(settings, target, page_size, head_dim, dtype)
    for layout in (anchor_layout, residual_layout):
        # Kernels do not clear padding, so there must be none.
        assert layout.fields[-1].offset + layout.fields[-1].nbytes == layout.nbytes
    exact = target == "exact"
    encode = settings.triton_encode()
    if any(chunk % CHUNK_STEP for chunk in encode.chunks):
        raise FormatError(
            f"kernels need chunks in multiples of {CHUNK_STEP} tokens, got {encode.chunks}"
        )
    padded = math.prod(1 << (size - 1).bit_length() for size in (page_size, head_dim))
    launch = {
        "PAGE_SIZE": page_size,
        "HEAD_DIM": head_dim,
        "TILE_GROUP": fragments.group_size(page_size * head_dim // fragments.TILE**2),
        "PART_WORDS": residual_layout.nbytes // 8,
        "KV_DTYPE": KV_DTYPES[dtype],
        "ENCODE_K": kernel_function(encode.encode_k),
        "ENCODE_V": kernel_function(encode.encode_v),
        "ANCHOR_BITS": settings.anchor_bits,
        "EXACT": exact,
        "K_CHUNK": encode.chunks[0],
        "V_CHUNK": encode.chunks[1],
        "K_FIELDS": _word_offsets(anchor_layout, "k", encode.metadata),
        "V_FIELDS": _word_offsets(anchor_layout, "v", encode.metadata),
        "LAW": encode.law,
        "num_warps": min(max(padded // (32 * encode.thread_elements), 1), MAX_WARPS),
        # The references round a product before they add it.
        "enable_fp_fusion": False,
    }
    return EncodeConstants(anchor_layout, residual_layout, launch)


@functools.lru_cache(maxsize=64)
def encode_table(settings: CodecSpec, head_dim: int, device: torch.device) -> torch.Tensor:
    """Return fp32 numbers on the device, 128 or more: 0, those of the codec, then infinities. All
    zeros for a codec without numbers. The first call builds them."""
    numbers = kernel_reference_of(settings).encode_table(settings, head_dim)
    table = torch.zeros(max(TABLE_SLOTS, len(numbers) + 1))
    if numbers:
        table[1:] = math.inf
        table[1 : len(numbers) + 1] = torch.tensor(numbers)
    return table.to(device)


def check_pages(k: torch.Tensor, v: torch.Tensor, names: str) -> None:
    """Raise ValueError unless k, v are [S, P, H, D], agree, and can be read as pairs."""
    if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"{names} must be [pages, page size, heads, head size] of equal shape, dtype and "
            f"device, got {_of(k)} and {_of(v)}"
        )
    if k.dtype not in KV_DTYPES:
        raise ValueError(f"{names} must be fp32, bf16 or fp16, got {k.dtype}")
    if k.stride() != v.stride():
        raise ValueError(f"{names} must have equal strides, got {k.stride()} and {v.stride()}")
    if k.stride(3) != 1 or any(stride % 2 for stride in k.stride()[:3]):
        raise ValueError(f"{names} must have contiguous heads and even strides, got {k.stride()}")
    if k.stride(1) * k.shape[1] >= 2**31:
        raise ValueError(f"a page of {names} must span less than 2^31 elements, got {k.stride()}")


def check_tokens(k: torch.Tensor, v: torch.Tensor, window: torch.Tensor) -> None:
    """Raise ValueError unless k, v are tokens [B, H, D] of the window's dtype and device, and
    agree."""
    for name, tokens in (("k_new", k), ("v_new", v)):
        same = tokens.dtype == window.dtype and tokens.device == window.device
        if tokens.ndim != 3 or tokens.shape[1:] != window.shape[2:] or not same:
            raise ValueError(
                f"{name} must be {window.dtype} [rows, {window.shape[2]}, {window.shape[3]}] on "
                f"{window.device}, got {_of(tokens)}"
            )
    if k.shape != v.shape or k.stride() != v.stride():
        raise ValueError(
            "k_new and v_new must have equal shapes and strides, got "
            f"{_of(k)} {k.stride()} and {_of(v)} {v.stride()}"
        )
    if k.stride(2) != 1 or any(stride % 2 for stride in k.stride()[:2]):
        raise ValueError(f"k_new must have contiguous heads and even strides, got {k.stride()}")


def check_records(records: torch.Tensor, layout: RecordLayout, heads: int, name: str) -> None:
    """Raise ValueError unless records are a pool [slots, heads, nbytes] uint8 of the layout."""
    if records.dtype != torch.uint8 or records.shape[1:] != (heads, layout.nbytes):
        raise ValueError(
            f"{name} must be uint8 [slots, {heads}, {layout.nbytes}], got {_of(records)}"
        )
    if records.stride(2) != 1 or any(s % formats.RECORD_ALIGNMENT for s in records.stride()[:2]):
        raise ValueError(
            f"{name} must have contiguous records at multiples of {formats.RECORD_ALIGNMENT} "
            f"bytes, got strides {records.stride()}"
        )


def check_indices(length: int, **indices: torch.Tensor) -> None:
    """Raise ValueError unless all indices are contiguous [length] int32 or int64."""
    for name, index in indices.items():
        if index.shape != (length,) or index.dtype not in INDEX_DTYPES or not index.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous [{length}] int32 or int64, got {_of(index)}"
            )


def check_devices(device: torch.device, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def pairs(pages: torch.Tensor) -> torch.Tensor:
    """Return a view of [..., D] values as [..., D / 2] integers."""
    return pages.view(PAIR_DTYPES[pages.dtype.itemsize])


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _word_offsets(layout: RecordLayout, part: str, metadata: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(layout[f"{part}_{name}"].offset // 4 for name in ("codes", *metadata))
