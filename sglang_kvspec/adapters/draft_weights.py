"""Copies of a model's weights in 4 bits, which only drafts read (QuantSpec, section 4)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvspec_kernels.ops import int4_products
from kvspec_kernels.ops.attention_plan import Backend
from kvspec_kernels.reference import int4_weights
from sglang_kvspec.adapters.calibration_texts import NUM_TEXTS, TEXT_LEN, write_texts
from sglang_kvspec.adapters.compat.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    VocabParallelEmbedding,
)
from sglang_kvspec.adapters.draft_operators import draft_operators
from sglang_kvspec.adapters.ranks import least_of_all_ranks
from sglang_kvspec.adapters.self_calibration import (
    groups_within,
    input_moments,
    moment_bytes,
    products_of,
    tf32_products,
)
from sglang_kvspec.adapters.weight_checkpoint import WeightCheckpoint
from sglang_kvspec.adapters.weight_copies import (
    COMPENSATED_AT_ONCE,
    ProjectionProduct,
    WeightCopy,
    arithmetic_of,
)
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, UnsupportedError
from sglang_kvspec.core.units import GIB
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import ModelForward
from sglang_kvspec.kv.forward_plan import Row
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.ranks import Ranks

logger = logging.getLogger(__name__)

# Moments of inputs that a CPU holds at once.
CPU_MOMENT_BYTES = GIB
# Name of the vocabulary projection in models of SGLang.
PROJECTION = "lm_head"
# Largest norm of the error of a checkpoint's weight, relative to the model's. Rounding to 4 bits
# errs by about a tenth, and weights of another model by more than 1.
MOST_ERROR = 0.5
# Matrices of a moment's size that compensation() makes.
FACTORS = 4
# GPU memory for the rest: activations and logits of a text, and temporaries of a block of rows.
# Before moments are measured, KV of the texts takes the memory of these.
MARGIN_BYTES = 2 * GIB


class DraftWeights:
    """Copies of the linear layers of a model that ranks share out, and of its vocabulary
    projection. Embeddings, norms, routers and fused experts have none: drafts use the model's own.

    Rounding of linear layers knows what inputs are like, from text that the model writes at the
    start. The projection is rounded to the nearest codes. Or the copies come from a checkpoint,
    which has no projection in 4 bits. When the model's weights change, refresh() rounds copies to
    the nearest codes. That is quick: requests wait for it. Copies stay where they are in memory, so
    captured graphs may hold their addresses. num_made: how often copies were made. checkpoint: the
    folder that the newest ones come from, or None.
    """

    def __init__(
        self,
        runner: Any,
        ranks: Ranks,
        checkpoint: WeightCheckpoint | None = None,
        kernels: Backend = "auto",
    ) -> None:
        """Must come before the KV pool, which gets the memory that copies leave, and all memory
        that only their rounding needs. Raises UnsupportedError for a model that has no weights to
        copy, and ConfigError where a GPU has no room for copies, or for a checkpoint that is not
        one of this model."""
        begin = time.perf_counter()
        self._layers = copied_layers(runner.model, is_checkpoint=checkpoint is not None)
        self._arithmetic = arithmetic_of(self._layers[0].weight.device, kernels)
        self.num_made = 0
        self._is_stale = False
        self.checkpoint = None if checkpoint is None else str(checkpoint.folder)
        stages: dict[str, float] = {}
        # Text does not have to be the target's own, and batch-invariant products of fp32 would
        # round to tf32. So would torch's own with --enable-tf32-matmul, which SGLang sets by itself
        # for some models.
        with torch.no_grad(), draft_operators(), tf32_products(False):
            if checkpoint is None:
                stages = self._make(runner, ranks)
            else:
                self._load(runner.model, checkpoint)
        pairs = zip(self._layers, self._copies, strict=True)
        self._products = [_product_of(layer, copy) for layer, copy in pairs]
        logger.info(
            "KVSpec: drafts use 4-bit copies of %d layers%s%s, %.2f GiB; they took %.1f s%s",
            len(self._layers),
            " with the vocabulary projection" if self.has_projection else "",
            "" if checkpoint is None else f" from {checkpoint.folder}",
            self.nbytes / GIB,
            time.perf_counter() - begin,
            "".join(f", {stage} {seconds:.1f} s" for stage, seconds in stages.items()),
        )

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    @property
    def has_projection(self) -> bool:
        """Return True if the vocabulary projection has a copy."""
        return any(map(_is_projection, self._layers))

    @property
    def most_rows(self) -> int:
        """Most rows of a forward that is faster with copies."""
        return self._copies[0].arithmetic.most_rows

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the model multiply with the copies. No target forward may run in this context. Graphs
        that are captured in it keep the copies."""
        assert not self._is_stale, "refresh() must come before drafts"
        with products_of(self._layers, self._products):
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
        self.checkpoint = None
        self.num_made += 1
        logger.info(
            "KVSpec: the model's weights have changed; new 4-bit copies took %.1f s",
            time.perf_counter() - begin,
        )

    def _load(self, model: Any, checkpoint: WeightCheckpoint) -> None:
        """Allocate the copies, and fill them from a checkpoint."""
        names = {id(module): name for name, module in model.named_modules()}
        device = self._layers[0].weight.device
        if device.type == "cuda":
            _check_room(copy_bytes(self._layers) + MARGIN_BYTES, _free_bytes(device))
        self._copies = []
        for layer in self._layers:
            name, weight = names[id(layer)], layer.weight
            read = checkpoint.read(name, weight.device)
            shape = (len(read.codes), read.num_inputs)
            if shape != tuple(weight.shape):
                raise ConfigError(
                    f"--kvspec-draft-weights {checkpoint.folder}: {name} is {list(shape)}, and "
                    f"{list(weight.shape)} in the model"
                )
            error = float(int4_weights.decode(read).sub_(weight).norm() / weight.float().norm())
            if not error <= MOST_ERROR:
                raise ConfigError(
                    f"--kvspec-draft-weights {checkpoint.folder}: {name} differs from the model's "
                    f"weight by {error:.2f} of its size (allowed: a checkpoint of the same model, "
                    f"{MOST_ERROR:g})"
                )
            self._copies.append(WeightCopy(weight, self._arithmetic))
            self._copies[-1].replace(read)
        self.num_made += 1

    def _make(self, runner: Any, ranks: Ranks) -> dict[str, float]:
        """Allocate the copies, and round a few layers at a time for inputs that are measured in
        forwards of their own: moments of all layers of a model of 8B take 30 GiB. Returns the
        seconds of each stage, for which it waits for the device."""
        device = self._layers[0].weight.device
        budget_bytes = _moment_budget(self._layers, device)
        self._copies = [WeightCopy(layer.weight, self._arithmetic) for layer in self._layers]
        linear = [layer for layer in self._layers if not _is_projection(layer)]
        timer = PhaseTimer(device)
        timer.start()
        texts = write_texts(runner, ranks, NUM_TEXTS, TEXT_LEN)
        timer.mark()
        copies = iter(self._copies)
        for group in groups_within(linear, budget_bytes):
            moments = input_moments(runner, group, texts)
            timer.mark()
            for layer in group:
                # The next layer needs the memory of this one's moment and factor.
                factor = int4_weights.compensation(moments.pop(0))
                copy = next(copies)
                rounding = copy.arithmetic.round_group
                encode = partial(int4_weights.compensated_by, factor=factor, round_group=rounding)
                copy.write(layer.weight, encode, COMPENSATED_AT_ONCE)
                del factor, encode
            timer.mark()
        # Compensated rounding of the projection keeps fewer drafts
        # (docs/benchmarks/draft-weights.md).
        for layer, copy in zip(self._layers[len(linear) :], copies, strict=True):
            copy.write(layer.weight, int4_weights.round_to_nearest)
        timer.mark()
        writing, *of_groups, nearest = timer.seconds()
        self.num_made += 1
        if device.type == "cuda":
            # SGLang counts what it takes for free when it sizes the KV pool.
            torch.cuda.empty_cache()
        return {
            "texts": writing,
            "inputs": sum(of_groups[::2]),
            "rounding": sum(of_groups[1::2]) + nearest,
        }


def _is_projection(layer: Any) -> bool:
    return isinstance(layer, VocabParallelEmbedding)


def _product_of(layer: Any, copy: WeightCopy) -> WeightCopy | ProjectionProduct:
    """Return what multiplies with the copy in place of the layer's quant_method."""
    return ProjectionProduct(copy) if _is_projection(layer) else copy


def _moment_budget(layers: list[Any], device: torch.device) -> int:
    """Return the bytes that moments of inputs may take at once, equal on all ranks, which must
    measure together. Raises ConfigError where a GPU has no room for copies and their rounding."""
    if device.type != "cuda":
        return CPU_MOMENT_BYTES
    free_bytes = _free_bytes(device)
    copies, largest = copy_bytes(layers), max(map(moment_bytes, layers))
    _check_room(copies + (FACTORS + 1) * largest + MARGIN_BYTES, free_bytes)
    return free_bytes - copies - FACTORS * largest - MARGIN_BYTES


def _free_bytes(device: torch.device) -> int:
    """Return the GPU memory that is free on all ranks."""
    torch.cuda.empty_cache()
    return least_of_all_ranks(torch.cuda.mem_get_info(device)[0])


def _check_room(needed_bytes: int, free_bytes: int) -> None:
    """Raise ConfigError if a GPU has no room for copies and what it takes to make them."""
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"--kvspec-draft-weights needs {needed_bytes / GIB:.1f} GiB of GPU memory beside the "
            f"model to make copies in 4 bits, of which {free_bytes / GIB:.1f} GiB are free "
            "(allowed: target, a smaller model or more ranks)"
        )


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
    if not has_copies(config, server_args):
        return None
    folder = config.weight_checkpoint
    checkpoint = None if folder is None else WeightCheckpoint(folder)
    return DraftWeights(runner, ranks, checkpoint, config.kernels)


def has_copies(config: KVSpecConfig, server_args: Any) -> bool:
    drafts = config.max_draft_len and server_args.disaggregation_mode != "prefill"
    return config.copies_weights and bool(drafts)


def copy_bytes(layers: list[Any]) -> int:
    """Return the bytes of copies of these layers on a GPU."""
    return sum(int4_products.bytes_of(*layer.weight.shape) for layer in layers)


def draft_weights_report(weights: DraftWeights | None) -> dict[str, Any]:
    """Return the section draft_weights of /server_info."""
    if weights is None:
        return {
            "kind": "target",
            "bytes": 0,
            "projection": False,
            "made": 0,
            "checkpoint": None,
        }
    return {
        "kind": "int4",
        "bytes": weights.nbytes,
        "projection": weights.has_projection,
        "made": weights.num_made,
        "checkpoint": weights.checkpoint,
    }


def copied_layers(model: Any, *, is_checkpoint: bool) -> list[Any]:
    """Return the layers that get copies: linear ones, and behind them the vocabulary projection if
    copies do not come from a checkpoint. Raises UnsupportedError as linear_layers() does."""
    layers = linear_layers(model)
    projection = None if is_checkpoint else vocabulary_projection(model)
    return layers if projection is None else [*layers, projection]


def vocabulary_projection(model: Any) -> Any | None:
    """Return the layer that turns hidden states into logits. None for a model that has none of
    SGLang's, or one that cannot be copied: drafts then use the model's own."""
    # A module that is the embeddings too has two names.
    named = model.named_modules(remove_duplicate=False)
    found = {id(each): each for name, each in named if name.rpartition(".")[2] == PROJECTION}
    if len(found) != 1:
        return None
    (layer,) = found.values()
    if not _is_projection(layer) or getattr(layer, "use_intel_amx_backend", False):
        return None
    return layer if isinstance(layer.quant_method, UnquantizedEmbeddingMethod) else None


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
