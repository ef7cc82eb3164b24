"""Products of target forwards under deterministic inference, at nearly the speed of torch.mm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvspec_kernels.ops import products
from sglang_kvspec.core.errors import UnsupportedError


def product(
    original: Callable[..., torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Return a [M, K] @ b [K, N] + bias [N], in place of SGLang's batch-invariant `original`. What
    the kernels do not take goes to `original`, for all M alike: fp32, and other arguments, such as
    out_dtype of 0.5.20."""
    weight = b.t()
    if others or not products.takes(a, weight):
        return original(a, b, bias=bias, **others)
    return products.product(a, weight, bias)


def check_products(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UnsupportedError if tiles of different sizes give different bits: then rows would
    depend on their number."""
    if dtype in products.DTYPES and not products.equal_tiles(device, dtype):
        raise UnsupportedError(
            "--enable-deterministic-inference cannot be used with --kvspec on this machine: as "
            f"Triton compiles them, products of {str(dtype).removeprefix('torch.')} depend on the "
            "number of rows"
        )
