"""Copies of a model's linear layers in 4 bits, which only drafts read (QuantSpec, section 4)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kvspec_kernels.reference import int4_weights
from kvspec_kernels.reference.int4_weights import Int4Weight
from sglang_kvspec.adapters.compat.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from sglang_kvspec.adapters.self_calibration import input_moments, products_of
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import ModelForward
from sglang_kvspec.kv.forward_plan import Row
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.ranks import Ranks

logger = logging.getLogger(__name__)


class Int4Product:
    """Product of a linear layer with a copy of its weight."""

    def __init__(self, weight: Int4Weight) -> None:
        self.weight = weight

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return int4_weights.product(x, self.weight, bias)


class DraftWeights:
    """Copies of the linear layers of a model that ranks share out. Embeddings, norms, routers, the
    vocabulary projection and fused experts have none: drafts use the model's own.

    Rounding knows what inputs are like, from text that the model writes at the start. When the
    model's weights change, copies are rounded to the nearest codes before the next draft. That is
    quick: requests wait for it. num_made: how often copies were made.
    """

    def __init__(self, runner: Any, ranks: Ranks) -> None:
        """Raises UnsupportedError for a model that has no weights to copy."""
        begin = time.perf_counter()
        self._layers = linear_layers(runner.model)
        moments = input_moments(runner, self._layers, ranks)
        self.num_made = 0
        self._keep(
            int4_weights.compensated(layer.weight.detach(), moment)
            for layer, moment in zip(self._layers, moments, strict=True)
        )
        logger.info(
            "KVSpec: drafts use 4-bit copies of %d linear layers, %.2f GiB; they took %.1f s",
            len(self._layers),
            self.nbytes / (1 << 30),
            time.perf_counter() - begin,
        )

    @property
    def nbytes(self) -> int:
        return sum(copy.weight.nbytes for copy in self._copies)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the model multiply with the copies. No target forward may run in this context."""
        if self._is_stale:
            self._copy_again()
        with products_of(self._layers, self._copies):
            yield

    def weights_will_change(self) -> None:
        self._is_stale = True

    def _copy_again(self) -> None:
        begin = time.perf_counter()
        self._keep(int4_weights.round_to_nearest(layer.weight.detach()) for layer in self._layers)
        logger.info(
            "KVSpec: the model's weights have changed; new 4-bit copies took %.1f s",
            time.perf_counter() - begin,
        )

    def _keep(self, weights: Iterable[Int4Weight]) -> None:
        """Let drafts use these copies of the layers' weights."""
        self._copies = [Int4Product(weight) for weight in weights]
        self._is_stale = False
        self.num_made += 1


class DraftForward:
    """A ModelForward with draft weights."""

    def __init__(self, forward: ModelForward, weights: DraftWeights) -> None:
        self._forward, self._weights = forward, weights

    def run(
        self, batch: RoundBatch, rows: Mapping[int, Row], made: DraftedTokens | None = None
    ) -> torch.Tensor:
        with self._weights.in_force():
            return self._forward.run(batch, rows, made)


def make_draft_weights(
    config: KVSpecConfig, server_args: Any, runner: Any, ranks: Ranks
) -> DraftWeights | None:
    """Return the copies that --kvspec-draft-weights asks for. None: drafts use the model's own
    weights, or the server does not draft."""
    drafts = config.max_draft_len and server_args.disaggregation_mode != "prefill"
    if config.draft_weights == "target" or not drafts:
        return None
    return DraftWeights(runner, ranks)


def draft_weights_report(weights: DraftWeights | None) -> dict[str, Any]:
    """Return the section draft_weights of /server_info."""
    if weights is None:
        return {"kind": "target", "bytes": 0, "made": 0}
    return {"kind": "int4", "bytes": weights.nbytes, "made": weights.num_made}


def linear_layers(model: Any) -> list[Any]:
    """Return the linear layers of a model that ranks share out. Raises UnsupportedError if there
    are none, or they cannot be copied."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    if not layers:
        raise UnsupportedError(
            f"--kvspec-draft-weights int4 cannot serve {type(model).__name__}, which has no linear "
            "layers of SGLang's (allowed: target)"
        )
    for layer in layers:
        method = layer.quant_method
        if not isinstance(method, UnquantizedLinearMethod):
            raise UnsupportedError(
                "--kvspec-draft-weights int4 needs weights that are not quantised: the model's "
                f"use {type(method).__name__}"
            )
        if getattr(layer, "use_intel_amx_backend", False):
            raise UnsupportedError(
                "--kvspec-draft-weights int4 cannot read weights that SGLang has packed for AMX"
            )
    return layers
