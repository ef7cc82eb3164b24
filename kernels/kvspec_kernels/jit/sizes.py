"""Sizes that kernels compute while they are compiled."""

from __future__ import annotations

import triton


@triton.constexpr_function  # type: ignore[untyped-decorator]
def next_power_of_2(n: int) -> int:
    """The least power of two >= n, n > 0. Triton's own is no longer callable from kernels once
    SGLang is imported, which puts a plain function in its place."""
    return 1 << (n - 1).bit_length()
