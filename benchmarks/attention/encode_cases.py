"""Speed of encoding pages and of appending tokens: Llama-8B geometry, bf16, page 64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvspec_kernels.codecs import CodecSpec
from kvspec_kernels.formats import (
    Log4Settings,
    Target,
    Uniform4Settings,
    anchor_layout,
    residual_layout,
)
from kvspec_kernels.ops.append import append
from kvspec_kernels.ops.encode import encode_pages

# Times a function that launches kernels on prepared tensors, in a CUDA graph. Returns the median
# and the spread, both in seconds.
Timer = Callable[[Callable[[], None]], tuple[float, float]]

HEADS, HEAD_DIM, PAGE = 8, 128, 64
DTYPE = torch.bfloat16
# 2 GB of K and V, forty times the size of the L2 cache.
ENCODED_PAGES = 8192
ROWS, WINDOW_PAGES, LAYERS = 16, 32, 32
SETTINGS: Mapping[str, CodecSpec] = {"log4": Log4Settings(), "uniform4": Uniform4Settings()}
TARGETS: tuple[Target, ...] = ("exact", "int8")


def bench_encode(
    timer: Timer, codecs: Mapping[str, CodecSpec] = SETTINGS, targets: Sequence[Target] = TARGETS
) -> dict[str, dict[str, float]]:
    """Return TB/s of bf16 read, TB/s of all bytes moved, and the time, per codec and target."""
    device = torch.device("cuda")
    shape = (ENCODED_PAGES, PAGE, HEADS, HEAD_DIM)
    k, v = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
    index = torch.arange(ENCODED_PAGES, device=device, dtype=torch.int32)
    results = {}
    for codec, settings in codecs.items():
        for target in targets:
            anchors, residuals = _pools(settings, target, ENCODED_PAGES, device)
            args = (k, v, index, anchors, index, residuals, index, settings, target)
            seconds, spread = timer(lambda args=args: encode_pages(*args))  # type: ignore[misc]
            read = k.nbytes + v.nbytes
            results[f"{codec}.{target}"] = {
                "tbps": read / seconds / 1e12,
                "moved_tbps": (read + anchors.nbytes + residuals.nbytes) / seconds / 1e12,
                "ms": seconds * 1e3,
                "spread_ms": spread * 1e3,
            }
            del anchors, residuals, args
    return results


def bench_append(timer: Timer) -> tuple[float, float]:
    """Return the seconds of an append per layer at batch 16, and their spread. A graph holds 32
    layers, each with a window of its own."""
    device = torch.device("cuda")
    tokens = torch.randn(2, ROWS, HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    window = torch.randn(LAYERS, 2, WINDOW_PAGES, PAGE, HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    slots = torch.arange(ROWS, device=device, dtype=torch.int32)
    offsets = torch.full_like(slots, PAGE - 1)

    def step() -> None:
        for k, v in window:
            append(*tokens, k, v, slots, offsets)

    seconds, spread = timer(step)
    return seconds / LAYERS, spread / LAYERS


def _pools(
    settings: CodecSpec, target: Target, slots: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    layouts = (
        anchor_layout(settings, PAGE, HEAD_DIM),
        residual_layout(settings, target, PAGE, HEAD_DIM, DTYPE),
    )
    anchors, residuals = (layout.empty_records((slots, HEADS), device) for layout in layouts)
    return anchors, residuals
