"""Copies of weights in 4 bits, which multiply in place of the layers that have them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from kvspec_kernels.ops import int4_products, int4_rounding
from kvspec_kernels.ops.attention_plan import Backend
from kvspec_kernels.reference import int4_weights
from kvspec_kernels.reference.int4_weights import Int4Weight, RoundGroup
from sglang_kvspec.adapters.compat.linear import UnquantizedEmbeddingMethod

# Weights that are rounded at once, in whole rows. Temporaries of round_to_nearest() then take
# 1 GiB, and a server that runs has little more.
WEIGHTS_AT_ONCE = 2048 * 14336
# Weights that compensated rounding takes at once, at the start, when memory is free. A GPU rounds a
# group of 64 inputs of all these rows in one launch, so many rows are better. Temporaries take
# 1 GiB here too.
COMPENSATED_AT_ONCE = 8192 * 14336


class Arithmetic(NamedTuple):
    """Functions over the copies of a device. product and write_rows take what empty returns.
    most_rows: with more rows, products with copies are no faster than with the weights."""

    empty: Callable[[int, int, torch.device], Any]
    write_rows: Callable[[Any, int, Int4Weight], None]
    product: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    round_group: RoundGroup
    most_rows: int


REFERENCE = Arithmetic(
    int4_weights.empty,
    int4_weights.write_rows,
    int4_weights.product,
    int4_weights.round_group,
    # Nothing is faster on a CPU. Tests of a few requests shall not depend on their number.
    most_rows=sys.maxsize,
)
KERNELS = Arithmetic(
    int4_products.empty,
    int4_products.write_rows,
    int4_products.product,
    int4_rounding.round_group,
    int4_products.MOST_ROWS,
)


def arithmetic_of(device: torch.device, kernels: Backend = "auto") -> Arithmetic:
    """Return the functions over the copies of a device. kernels: of products. "cuda" is "auto":
    many rows have no CUDA kernel."""
    if device.type != "cuda":
        return REFERENCE
    if kernels == "triton":
        return KERNELS._replace(product=partial(int4_products.product, backend=kernels))
    return KERNELS


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

    def write(
        self,
        weight: torch.Tensor,
        encode: Callable[[torch.Tensor], Int4Weight],
        at_once: int | None = None,
    ) -> None:
        """Replace the copy, in place, with `weight` as `encode` rounds it. encode: takes some rows
        of the weight, each of which must not depend on the others. at_once: weights that it takes,
        WEIGHTS_AT_ONCE by default."""
        rows_at_once = max((at_once or WEIGHTS_AT_ONCE) // weight.shape[1], 1)
        for begin in range(0, len(weight), rows_at_once):
            rows = encode(weight[begin : begin + rows_at_once])
            self.arithmetic.write_rows(self._copy, begin, rows)

    def replace(self, weight: Int4Weight) -> None:
        """Replace the copy, in place, with a weight in 4 bits [N, K]."""
        self.arithmetic.write_rows(self._copy, 0, weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply in place of the layer's quant_method."""
        return self.arithmetic.product(x, self._copy, bias)


class ProjectionProduct(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Product with a copy of the vocabulary projection. Where the projection is the embeddings too,
    these are looked up in the model's own weight.

    LogitsProcessor multiplies by a projection's quant_method only if the name of its class is not
    one of those without quantisation. Ranks look embeddings up in one launch only if it is an
    UnquantizedEmbeddingMethod.
    """

    def __init__(self, copy: WeightCopy) -> None:
        self._copy = copy

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of x [M, K], in the dtype of the layer's weight, as LogitsProcessor does
        for a projection without quantisation."""
        return self._copy.apply(layer, x.to(layer.weight.dtype), bias)
