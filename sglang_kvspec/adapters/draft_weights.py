"""Copies of a model's linear layers in 4 bits, which only drafts read (QuantSpec, section 4)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvspec_kernels.ops import int4_products
from kvspec_kernels.reference import int4_weights
from sglang_kvspec.adapters.compat.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from sglang_kvspec.adapters.draft_operators import draft_operators
from sglang_kvspec.adapters.ranks import least_of_all_ranks
from sglang_kvspec.adapters.self_calibration import (
    NUM_TEXTS,
    TEXT_LEN,
    groups_within,
    input_moments,
    moment_bytes,
    products_of,
    write_texts,
)
from sglang_kvspec.adapters.weight_copies import WeightCopy, arithmetic_of
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, UnsupportedError
from sglang_kvspec.core.units import GIB
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import ModelForward
from sglang_kvspec.kv.forward_plan import Row
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.ranks import Ranks

logger = logging.getLogger(__name__)

# Moments of inputs that a CPU holds at once.
CPU_MOMENT_BYTES = GIB
# Matrices of a moment's size that compensation() makes.
FACTORS = 4
# GPU memory for the rest: activations and logits of a text, and temporaries of a block of rows.
# Before moments are measured, KV of the texts takes the memory of these.
MARGIN_BYTES = 2 * GIB


class DraftWeights:
    """Copies of the linear layers of a model that ranks share out. Embeddings, norms, routers, the
    vocabulary projection and fused experts have none: drafts use the model's own.

    Rounding knows what inputs are like, from text that the model writes at the start. When the
    model's weights change, refresh() rounds copies to the nearest codes. That is quick: requests
    wait for it. Copies stay where they are in memory, so captured graphs may hold their addresses.
    num_made: how often copies were made.
    """

    def __init__(self, runner: Any, ranks: Ranks) -> None:
        """Must come before the KV pool, which gets the memory that copies leave, and all memory
        that only their rounding needs. Raises UnsupportedError for a model that has no weights to
        copy, and ConfigError where a GPU has no room for copies."""
        begin = time.perf_counter()
        self._layers = linear_layers(runner.model)
        self.num_made = 0
        self._is_stale = False
        # Text does not have to be the target's own, and batch-invariant products of fp32 would
        # round to tf32.
        with torch.no_grad(), draft_operators():
            self._make(runner, ranks)
        logger.info(
            "KVSpec: drafts use 4-bit copies of %d linear layers, %.2f GiB; they took %.1f s",
            len(self._layers),
            self.nbytes / GIB,
            time.perf_counter() - begin,
        )

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    @property
    def most_rows(self) -> int:
        """Most rows of a forward that is faster with copies."""
        return self._copies[0].arithmetic.most_rows

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the model multiply with the copies. No target forward may run in this context. Graphs
        that are captured in it keep the copies."""
        assert not self._is_stale, "refresh() must come before drafts"
        with products_of(self._layers, self._copies):
            yield

    def weights_will_change(self) -> None:
        self._is_stale = True

    def refresh(self) -> None:
        """Copy again if the model's weights have changed. Must come before drafts of any kind, and
        while none runs. Enqueues on the current stream, for which later drafts wait."""
        if not self._is_stale:
            return
        begin = time.perf_counter()
        with torch.no_grad():
            for layer, copy in zip(self._layers, self._copies, strict=True):
                copy.write(layer.weight, int4_weights.round_to_nearest)
        self._is_stale = False
        self.num_made += 1
        logger.info(
            "KVSpec: the model's weights have changed; new 4-bit copies took %.1f s",
            time.perf_counter() - begin,
        )

    def _make(self, runner: Any, ranks: Ranks) -> None:
        """Allocate the copies, and round a few layers at a time for inputs that are measured in
        forwards of their own: moments of all layers of a model of 8B take 30 GiB."""
        device = self._layers[0].weight.device
        budget_bytes = _moment_budget(self._layers, device)
        self._copies = [WeightCopy(layer.weight, arithmetic_of(device)) for layer in self._layers]
        texts = write_texts(runner, ranks, NUM_TEXTS, TEXT_LEN)
        copies = iter(self._copies)
        for group in groups_within(self._layers, budget_bytes):
            moments = input_moments(runner, group, texts)
            for layer in group:
                # The next layer needs the memory of this one's moment and factor.
                factor = int4_weights.compensation(moments.pop(0))
                copy = next(copies)
                rounding = copy.arithmetic.round_group
                encode = partial(int4_weights.compensated_by, factor=factor, round_group=rounding)
                copy.write(layer.weight, encode)
                del factor, encode
        self.num_made += 1
        if device.type == "cuda":
            # SGLang counts what it takes for free when it sizes the KV pool.
            torch.cuda.empty_cache()


def _moment_budget(layers: list[Any], device: torch.device) -> int:
    """Return the bytes that moments of inputs may take at once, equal on all ranks, which must
    measure together. Raises ConfigError where a GPU has no room for copies and their rounding."""
    if device.type != "cuda":
        return CPU_MOMENT_BYTES
    torch.cuda.empty_cache()
    free_bytes = least_of_all_ranks(torch.cuda.mem_get_info(device)[0])
    copies, largest = copy_bytes(layers), max(map(moment_bytes, layers))
    budget_bytes = free_bytes - copies - FACTORS * largest - MARGIN_BYTES
    if budget_bytes < largest:
        needed = copies + (FACTORS + 1) * largest + MARGIN_BYTES
        raise ConfigError(
            f"--kvspec-draft-weights int4 needs {needed / GIB:.1f} GiB of GPU memory beside the "
            f"model to make its copies, of which {free_bytes / GIB:.1f} GiB are free (allowed: "
            "target, a smaller model or more ranks)"
        )
    return budget_bytes


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
    return DraftWeights(runner, ranks) if has_copies(config, server_args) else None


def has_copies(config: KVSpecConfig, server_args: Any) -> bool:
    drafts = config.max_draft_len and server_args.disaggregation_mode != "prefill"
    return config.draft_weights != "target" and bool(drafts)


def copy_bytes(layers: list[Any]) -> int:
    """Return the bytes of copies of these layers on a GPU."""
    return sum(int4_products.bytes_of(*layer.weight.shape) for layer in layers)


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
