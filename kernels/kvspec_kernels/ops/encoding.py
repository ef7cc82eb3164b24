"""Constants of the encode kernels, and checks of the pages and records of encode and append."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvspec_kernels import formats
from kvspec_kernels.formats import FormatError, Log4Settings, RecordLayout, Target, Uniform4Settings
from kvspec_kernels.reference import fragments
from kvspec_kernels.reference.companding import tables

Settings = Log4Settings | Uniform4Settings

KV_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Two channels as one integer: what the kernels load.
PAIR_DTYPES = {2: torch.int32, 4: torch.int64}
INDEX_DTYPES = (torch.int32, torch.int64)

CHUNK_STEP = 16
# Tokens of a pair of V's tiles.
PAIR_STEP = 32
EDGE_SLOTS = 128
# Where the law's steep or flat ends are out of reach of arithmetic in fp32.
MAX_ALPHA = 64.0
MIN_ALPHA_OF_LOGARITHM = 0.05
# Added to the law before rounding: more than its error in fp32 (6e-4), far less than one step.
PUSH = 2e-3

# Values a thread holds. Measured on one H200 at page 64, head 128: log4 encodes 1.3 times as fast
# with twice as many, uniform4 no faster.
THREAD_ELEMENTS = {"log4": 128, "uniform4": 64}
MAX_WARPS = 16


@dataclass(frozen=True)
class EncodeConstants:
    """Layouts of the records, and keyword arguments of `jit/encode.py` that follow from them."""

    anchor_layout: RecordLayout
    residual_layout: RecordLayout
    launch: Mapping[str, object]


@functools.lru_cache(maxsize=64)
def encode_constants(
    settings: Settings, target: Target, page_size: int, head_dim: int, dtype: torch.dtype
) -> EncodeConstants:
    """Raises FormatError for what no layout or no kernel exists for."""
    anchor_layout = formats.anchor_layout(settings, page_size, head_dim)
    residual_layout = formats.residual_layout(settings, target, page_size, head_dim, dtype)
    for layout in (anchor_layout, residual_layout):
        # Nothing else clears padding.
        assert layout.fields[-1].offset + layout.fields[-1].nbytes == layout.nbytes
    exact = target == "exact"
    if isinstance(settings, Log4Settings):
        _check_log4(settings)
        codec, chunks = "log4", (settings.k_chunk, settings.v_chunk)
        metadata, law = ("centre", "scale"), _law(settings)
    else:
        codec, chunks = "uniform4", (settings.k_group, CHUNK_STEP)
        metadata, law = ("scale", "zero"), ()
    if any(chunk % CHUNK_STEP for chunk in chunks):
        raise FormatError(f"kernels take chunks of multiples of {CHUNK_STEP} tokens, got {chunks}")
    padded = math.prod(1 << (size - 1).bit_length() for size in (page_size, head_dim))
    launch = {
        "PAGE_SIZE": page_size,
        "HEAD_DIM": head_dim,
        "TILE_GROUP": fragments.group_size(page_size * head_dim // fragments.TILE**2),
        "PART_WORDS": residual_layout.nbytes // 8,
        "KV_DTYPE": KV_DTYPES[dtype],
        "CODEC": codec,
        "ANCHOR_BITS": settings.anchor_bits,
        "EXACT": exact,
        "K_CHUNK": chunks[0],
        "V_CHUNK": chunks[1],
        "K_FIELDS": _word_offsets(anchor_layout, "k", metadata),
        "V_FIELDS": _word_offsets(anchor_layout, "v", metadata),
        "LAW": law,
        "num_warps": min(max(padded // (32 * THREAD_ELEMENTS[codec]), 1), MAX_WARPS),
        # The references round products before they add.
        "enable_fp_fusion": False,
    }
    return EncodeConstants(anchor_layout, residual_layout, launch)


@functools.lru_cache(maxsize=64)
def integer_edges(settings: Settings, device: torch.device) -> torch.Tensor:
    """fp32 [128] on the device: 0, which no value is below, the law's edges, then infinities. Of
    uniform4, which has none, zeros. Built once, by the first call."""
    edges = torch.zeros(EDGE_SLOTS)
    if isinstance(settings, Log4Settings):
        edges[1:] = math.inf
        edges[1 : settings.top + 1] = tables(settings, torch.device("cpu")).integer_edges
    return edges.to(device)


def check_pages(k: torch.Tensor, v: torch.Tensor, names: str) -> None:
    """ValueError unless k, v are [S, P, H, D] alike, with tokens that can be read as pairs."""
    if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"{names} must be [pages, page size, heads, head size] and agree, got {_of(k)} and "
            f"{_of(v)}"
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
    """ValueError unless k, v are tokens [B, H, D] of the window's dtype and device, alike."""
    for name, tokens in (("k_new", k), ("v_new", v)):
        same = tokens.dtype == window.dtype and tokens.device == window.device
        if tokens.ndim != 3 or tokens.shape[1:] != window.shape[2:] or not same:
            raise ValueError(
                f"{name} must be {window.dtype} [rows, {window.shape[2]}, {window.shape[3]}] on "
                f"{window.device}, got {_of(tokens)}"
            )
    if k.shape != v.shape or k.stride() != v.stride():
        raise ValueError(f"k_new and v_new must agree, got {_of(k)} and {_of(v)}")
    if k.stride(2) != 1 or any(stride % 2 for stride in k.stride()[:2]):
        raise ValueError(f"k_new must have contiguous heads and even strides, got {k.stride()}")


def check_records(records: torch.Tensor, layout: RecordLayout, heads: int, name: str) -> None:
    """ValueError unless records are a pool [slots, heads, nbytes] uint8 of the layout."""
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
    """ValueError unless all indices are contiguous [length] int32 or int64."""
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
    """A view of [..., D] values as [..., D / 2] integers."""
    return pages.view(PAIR_DTYPES[pages.dtype.itemsize])


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _word_offsets(layout: RecordLayout, part: str, metadata: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(layout[f"{part}_{name}"].offset // 4 for name in ("codes", *metadata))


def _check_log4(settings: Log4Settings) -> None:
    if settings.centre != "midrange":
        raise FormatError(
            "kernels take the centre midrange only: a mean depends on the order of summation"
        )
    if settings.alpha > MAX_ALPHA:
        raise FormatError(f"kernels take alpha up to {MAX_ALPHA}, got {settings.alpha}")
    if settings.anchor_bits == 2 and settings.v_chunk % PAIR_STEP:
        raise FormatError(
            f"kernels take v_chunk in multiples of {PAIR_STEP} for anchor_bits 2, "
            f"got {settings.v_chunk}"
        )


def _law(settings: Log4Settings) -> tuple[float, ...]:
    """LAW of jit/encode_log4.py."""
    alpha = settings.alpha
    if alpha == 0:
        return (float(settings.top),)
    if alpha < MIN_ALPHA_OF_LOGARITHM:
        return ()
    slope = settings.top / math.log2(1 + alpha)
    # At the far end, where it counts least, this lifts the law by PUSH.
    return (alpha, 1 + PUSH * (1 + alpha) * math.log(2) / slope, slope)
