"""Copies of the weights of linear layers in 4 bits, which multiply in place of the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvspec_kernels.ops import int4_products, int4_rounding
from kvspec_kernels.reference import int4_weights
from kvspec_kernels.reference.int4_weights import Int4Weight, RoundGroup

# Rows that are rounded at once. Full-precision temporaries of a block then take 1 GiB for the
# widest layers, and a GPU has a program for each multiprocessor.
ROWS_AT_ONCE = 2048


class Arithmetic(NamedTuple):
    """Functions over the copies of a device. product and write_rows take what empty returns."""

    empty: Callable[[int, int, torch.device], Any]
    write_rows: Callable[[Any, int, Int4Weight], None]
    product: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    round_group: RoundGroup


REFERENCE = Arithmetic(
    int4_weights.empty, int4_weights.write_rows, int4_weights.product, int4_weights.round_group
)
KERNELS = Arithmetic(
    int4_products.empty, int4_products.write_rows, int4_products.product, int4_rounding.round_group
)


def arithmetic_of(device: torch.device) -> Arithmetic:
    return KERNELS if device.type == "cuda" else REFERENCE


class WeightCopy:
    """Copy of a weight [N, K], whose memory stays where it is. Products with one copy must not
    overlap: those of a GPU count arrivals in it."""

    def __init__(self, weight: torch.Tensor, arithmetic: Arithmetic) -> None:
        """Allocates the copy on the weight's device; write() fills it."""
        self.arithmetic = arithmetic
        self._copy = arithmetic.empty(*weight.shape, weight.device)

    @property
    def nbytes(self) -> int:
        return int(self._copy.nbytes)

    def write(self, weight: torch.Tensor, encode: Callable[[torch.Tensor], Int4Weight]) -> None:
        """Replace the copy, in place, with `weight` as `encode` rounds it. encode: takes some rows
        of the weight, each of which must not depend on the others."""
        for begin in range(0, len(weight), ROWS_AT_ONCE):
            rows = encode(weight[begin : begin + ROWS_AT_ONCE])
            self.arithmetic.write_rows(self._copy, begin, rows)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply in place of the layer's quant_method."""
        return self.arithmetic.product(x, self._copy, bias)
