"""Sizes that kernels compute at compile time."""

from __future__ import annotations

import triton

from kvspec_kernels.codecs import fields

# Called in kernels.
hadamard_block = triton.constexpr_function(fields.hadamard_block)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def next_power_of_2(n: int) -> int:
    """Return the least power of two >= n, n > 0. SGLang replaces Triton's own function by a plain
    function, which kernels cannot call."""
    return 1 << (n - 1).bit_length()
