"""Forecast of a model on a GPU at a context length, for `sglang-kvspec plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from sglang_kvspec.core.config import (
    AUTO_RESIDUAL,
    AUTO_WEIGHTS,
    DEFAULT_PAGE_SIZE,
    MAX_DRAFT_LEN,
    ExactResidual,
    Target,
    Weights,
)
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.capacity import PageBytes, window_pages_for
from sglang_kvspec.planning.costs import AcceptanceCurve, IterationCosts
from sglang_kvspec.planning.devices import (
    ALL_REDUCE_S,
    LAYER_ENCODE_S,
    LAYER_LISTS_S,
    LAYER_OVERHEAD_S,
    MEMORY_SHARE,
    UNPACK_SHARE,
    Device,
    attention_shares,
)
from sglang_kvspec.planning.draft_budget import (
    ALL_PAGES,
    SCORE_READS,
    allowed_budgets,
    kept_drafts,
    mass_read,
    share_read,
)
from sglang_kvspec.planning.draft_weights import INT4_BITS, INT4_KEPT
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.record_bytes import page_bytes_of
from sglang_kvspec.planning.throughput import Expectation, RequestBytes, Setting, expect

# Mean accepted drafts by draft length: benchmarks/results/acceptance.json, a model of 31 million
# parameters after 4096-token prompts. No larger model has been measured.
_DRAFT_LENS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
MEASURED_ACCEPTANCE: Mapping[str, AcceptanceCurve] = {
    "log4": AcceptanceCurve(
        _DRAFT_LENS, (0.987, 1.955, 3.87, 7.577, 14.565, 21.038, 27.052, 38.492, 49.098)
    ),
    "uniform4": AcceptanceCurve(
        _DRAFT_LENS, (0.985, 1.96, 3.865, 7.57, 14.553, 21.093, 27.235, 38.728, 49.463)
    ),
}
LEAST_CONTEXT, MOST_CONTEXT = 4096, 524288


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model, a GPU and KVSpec's settings, validated.

    model: the whole model's shape, which tp ranks share. host_bytes: host memory for residuals of
    all ranks, inf for as much as needed. memory_share: share of HBM for weights and KV.
    draft_budget: share of its pages that a request's drafts read, None for auto. draft_weights: the
    weights that drafts read, AUTO_WEIGHTS for those with the most tokens a second. exact_residual:
    form of residuals in host memory.
    """

    model: ModelShape
    device: Device
    curve: AcceptanceCurve
    codec: str = "uniform4"
    target: Target = "exact"
    tp: int = 1
    host_bytes: float = inf
    page_size: int = DEFAULT_PAGE_SIZE
    recent_pages: int = 1
    max_requests: int = 256
    memory_share: float = MEMORY_SHARE
    max_draft_len: int = MAX_DRAFT_LEN
    draft_budget: float | None = None
    draft_weights: Weights = "target"
    exact_residual: ExactResidual = "raw"

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise ConfigError(f"--max-running-requests must be >= 1, got {self.max_requests}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(
                f"--mem-fraction-static must be above 0 and at most 1, got {self.memory_share}"
            )
        if self.target == "int8" and self.page_size != DEFAULT_PAGE_SIZE:
            raise ConfigError(
                f"--page-size {self.page_size} cannot be combined with --target int8 on a GPU "
                f"(allowed: {DEFAULT_PAGE_SIZE})"
            )
        if not self.host_bytes >= 0:
            raise ConfigError(f"--host-memory-gb must be >= 0, got {self.host_bytes / 1e9:g}")
        assert self.exact_residual != AUTO_RESIDUAL, "the form of residuals is not decided yet"
        if self.exact_residual == "packed" and not self.host_bytes:
            raise ConfigError("--exact-residual packed has no effect with --host-memory-gb 0")
        if self.kv_bytes <= 0:
            usable = self.device.hbm_bytes * self.memory_share
            raise ConfigError(
                f"the model's weights ({self.rank_shape.weight_bytes / 1e9:.1f} GB a GPU) leave no "
                f"room for KV in {usable / 1e9:.1f} usable GB of {self.device.name}: raise --tp"
            )
        if self.draft_weights == "int4":
            if not self.can_copy:
                raise ConfigError(
                    "--draft-weights int4 needs a model in bfloat16 with linear layers (allowed: "
                    "auto, target)"
                )
            if self.kv_bytes <= self.copies_bytes:
                raise ConfigError(
                    f"--draft-weights int4 takes {self.copies_bytes / 1e9:.1f} GB a GPU, and the "
                    f"model leaves {self.kv_bytes / 1e9:.1f} GB: raise --tp, or leave it out"
                )

    @property
    def rank_shape(self) -> ModelShape:
        return self.model.of_rank(self.tp)

    @property
    def page_bytes(self) -> PageBytes:
        """Bytes of one page on one rank."""
        shape, form = self.rank_shape, self.exact_residual
        return page_bytes_of(shape, self.codec, self.target, self.page_size, form)

    @property
    def kv_bytes(self) -> float:
        """HBM bytes of one rank that weights leave to KV."""
        return self.device.hbm_bytes * self.memory_share - self.rank_shape.weight_bytes

    @property
    def can_copy(self) -> bool:
        """Return True if the model has weights in 16 bits, so that they can be copied."""
        return self.model.copied_params > 0 and self.model.weight_bytes_per_param == 2

    @property
    def copies_bytes(self) -> float:
        """HBM bytes of one rank that copies of its weights for drafts take."""
        return self.rank_shape.copied_params * INT4_BITS / 8

    @property
    def weights_to_try(self) -> tuple[Weights, ...]:
        """Weights that drafts may read."""
        if self.draft_weights != AUTO_WEIGHTS:
            return (self.draft_weights,)
        fits = self.can_copy and self.copies_bytes < self.kv_bytes
        return ("target", "int4") if fits else ("target",)

    def costs(
        self, pages_read: float = ALL_PAGES, draft_weights: Weights = "target"
    ) -> IterationCosts:
        """Seconds of each part of an iteration, from bytes and FLOPs and the shares reached.
        pages_read: share of the pages that drafts read. draft_weights: target or int4."""
        shape, device, page = self.rank_shape, self.device, self.page_bytes
        shares = attention_shares(device, self.codec, self.target)
        per_param = shape.weight_bytes_per_param / device.read_bytes_per_s
        # With the target `exact`, a verification reads the model's own values and no anchors.
        verified = page.residual + (page.anchor if self.target == "int8" else 0)
        all_reduces = 2 * ALL_REDUCE_S if self.tp > 1 else 0.0
        pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
        draft_s = self._token_seconds(page.anchor, shares.draft)
        chooses = pages_read < ALL_PAGES
        return IterationCosts(
            overhead_s=shape.num_layers * (LAYER_OVERHEAD_S + all_reduces),
            kvspec_s=shape.num_layers * (LAYER_ENCODE_S + chooses * LAYER_LISTS_S),
            weights_s=shape.dense_params * per_param,
            experts_s=shape.expert_params * per_param,
            expert_share=shape.expert_share,
            copied_s=(draft_weights == "int4") * shape.copied_params * per_param,
            token_s=2 * shape.params_per_token / device.usable_flops,
            plain_kv_token_s=shape.kv_bytes_per_token / device.read_bytes_per_s,
            draft_kv_token_s=draft_s * pages_read,
            score_kv_token_s=draft_s * chooses * SCORE_READS,
            verify_kv_token_s=self._token_seconds(verified, shares.verify),
            verify_pair_s=pair_flops / (device.flops * shares.verify_flops),
        )

    def setting(
        self, context_len: int, budget: float = ALL_PAGES, draft_weights: Weights = "target"
    ) -> Setting:
        """Return the setting of a context length, with drafts that read a budget's pages and these
        weights."""
        if context_len < 1:
            raise ConfigError(f"--context must be >= 1, got {context_len}")
        page = self.page_bytes
        num_pages = -(-context_len // self.page_size)
        pages_read = share_read(budget, num_pages)
        curve = self.curve
        if pages_read < ALL_PAGES:
            curve = curve.thinned(kept_drafts(budget))
        if draft_weights == "int4":
            curve = curve.thinned(INT4_KEPT)
        window = window_pages_for(1, self.recent_pages, self.max_draft_len, self.page_size)
        return Setting(
            context_len=context_len,
            request=RequestBytes(
                plain=num_pages * page.plain,
                always=num_pages * page.anchor + window * page.plain,
                residual=num_pages * page.residual,
                stored=num_pages * page.stored,
            ),
            costs=self.costs(pages_read, draft_weights),
            curve=curve,
            kv_bytes=self.kv_bytes,
            link_bytes_per_s=self.device.fetch_bytes_per_s,
            host_bytes=self.host_bytes / self.tp,
            copies_bytes=self.copies_bytes if draft_weights == "int4" else 0.0,
            unpack_s=num_pages * self._unpack_seconds(page),
            max_requests=self.max_requests,
            max_draft_len=self.max_draft_len,
            pages_read=pages_read,
            mass_read=mass_read(budget) if pages_read < ALL_PAGES else 1.0,
        )

    def _unpack_seconds(self, page: PageBytes) -> float:
        """Return the GPU seconds to unpack a page from host memory, 0 for pages that come raw."""
        if page.packed is None:
            return 0.0
        return (page.packed + page.anchor) / (self.device.hbm_bytes_per_s * UNPACK_SHARE)

    def _token_seconds(self, page_bytes: int, share: float) -> float:
        return page_bytes / self.page_size / (self.device.hbm_bytes_per_s * share)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expectations at one context length, with residuals in HBM only and with a host store."""

    context_len: int
    resident: Expectation
    fetched: Expectation


def forecast(deployment: Deployment, context_len: int) -> Forecast:
    """Forecast one context length. Raises ConfigError for one that the model cannot hold."""
    longest = deployment.model.max_context
    if context_len > longest:
        raise ConfigError(
            f"--context must be at most {longest}, the longest context of the model "
            f"(max_position_embeddings in its config), got {context_len}"
        )
    budgets = allowed_budgets(deployment.draft_budget, may_read_all=True)
    settings = [
        deployment.setting(context_len, budget, weights)
        for weights in deployment.weights_to_try
        for budget in reversed(budgets)
    ]
    return Forecast(
        context_len,
        resident=_best(expect(replace(each, host_bytes=0.0), may_fetch=False) for each in settings),
        fetched=_best(expect(each) for each in settings),
    )


def _best(expected: Iterable[Expectation]) -> Expectation:
    """Return the expectation with the most tokens a second; of equal ones, that with the best
    cycle, then the first."""
    return max(expected, key=lambda each: (each.tokens_per_s, each.speculative_speed_up))


def sweep(deployment: Deployment, context_lens: Sequence[int]) -> list[Forecast]:
    return [forecast(deployment, context_len) for context_len in context_lens]


def sweep_contexts(context_len: int, max_context: int) -> list[int]:
    """Powers of two from 4K to 512K that the model can hold, and the context asked for."""
    lens = {context_len}
    power = LEAST_CONTEXT
    while power <= min(max_context, MOST_CONTEXT):
        lens.add(power)
        power *= 2
    return sorted(lens)


def read_acceptance(results: Mapping[str, Any], codec: str) -> AcceptanceCurve:
    """Return the codec's curve from results of benchmarks/bench_acceptance.py. Raises ConfigError
    where they hold none."""
    prefix = f"accept.{codec}.mean_of_"
    means: dict[int, float] = {}
    try:
        for figure in results.get("figures", ()):
            draft_len = str(figure["name"]).removeprefix(prefix)
            if figure["name"] != draft_len and draft_len.isdecimal():
                means[int(draft_len)] = float(figure["value"])
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            "the file of --acceptance must hold a list `figures` of objects with a name and a value"
        ) from error
    if not means:
        raise ConfigError(f"the file of --acceptance holds no figures named {prefix}N")
    return AcceptanceCurve.from_means(means)
