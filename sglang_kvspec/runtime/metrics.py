"""Counters of drafting and verification, and their Prometheus export."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from operator import attrgetter

from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.runtime.draft_counts import DraftCounts
from sglang_kvspec.runtime.pressure import OPERATING_REASONS, Pressure
from sglang_kvspec.runtime.speeds import Speeds

# Tiers of a cached prefix: the KV cache, host memory outside of it, disk, a prefix server.
HIT_TIERS = ("resident", "host", "disk", "remote")
# Tiers from which residuals of kept anchors may be loaded.
KEPT_TIERS = ("host", "disk")


@dataclass(slots=True)
class SpecCounters:
    """Totals since the server started. accept_histogram: verifications by accepted drafts.

    mixed_iterations: forwards with verifications and piggyback drafts; drafted_piggyback: drafts
    made in them. waits: request-iterations spent waiting for residuals. plain: tokens emitted by
    plain steps, because drafts would not have paid. hit_tokens: prompt tokens found in the prefix
    cache, by the tier of their KV. kept_anchors: those of hit_tokens whose anchors were still in
    GPU memory, by the tier of their residuals. drafts: what drafts read, by budget. corrupt:
    requests that failed because a page in the residual store had changed.
    """

    iterations: int = 0
    mixed_iterations: int = 0
    drafted_piggyback: int = 0
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    emitted: int = 0
    waits: int = 0
    plain: int = 0
    corrupt: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    accept_histogram: Counter[int] = field(default_factory=Counter)
    hit_tokens: Counter[str] = field(default_factory=Counter)
    kept_anchors: Counter[str] = field(default_factory=Counter)

    def observe_verification(self, num_drafts: int, num_accepted: int) -> None:
        self.verifications += 1
        self.drafted += num_drafts
        self.accepted += num_accepted
        self.emitted += num_accepted + 1
        self.accept_histogram[num_accepted] += 1

    def observe_piggyback(self, num_drafts: int) -> None:
        """Count the drafts that piggybacked on one verification forward."""
        self.mixed_iterations += num_drafts > 0
        self.drafted_piggyback += num_drafts

    def observe_plain(self, num_tokens: int) -> None:
        self.plain += num_tokens
        self.emitted += num_tokens

    def observe_hits(self, resident: int, host: int, disk: int, remote: int = 0) -> None:
        for tier, num_tokens in zip(HIT_TIERS, (resident, host, disk, remote), strict=True):
            self.hit_tokens[tier] += num_tokens

    def observe_kept_anchors(self, host: int, disk: int) -> None:
        for tier, num_tokens in zip(KEPT_TIERS, (host, disk), strict=True):
            self.kept_anchors[tier] += num_tokens

    @property
    def rejected(self) -> int:
        """Number of drafts that were verified and rejected."""
        return self.drafted - self.accepted

    @property
    def mean_accept_len(self) -> float:
        """Accepted drafts per verification."""
        return self.accepted / self.verifications if self.verifications else 0.0


class MetricsExporter:
    """Exporter of counters to prometheus_client's default registry.

    SGLang sets up multi-process collection before schedulers start, so metrics made here appear on
    the server's /metrics.
    """

    def __init__(self, model_name: str) -> None:
        # Import late: prometheus_client fixes its storage when it is first imported.
        from prometheus_client import Counter as PromCounter
        from prometheus_client import Gauge, Histogram

        label = ["model_name"]
        self._model_name = model_name
        self._last = SpecCounters()
        self._last_bytes = (0, 0)
        self._last_retracted: Counter[str] = Counter()

        def counter(name: str, text: str, *labels: str) -> PromCounter:
            return PromCounter(f"sglang:kvspec_{name}", text, [*label, *labels])

        # By the field of SpecCounters that each exports.
        self._counters = {
            "drafted": counter("drafted_tokens", "Draft tokens verified"),
            "accepted": counter("accepted_tokens", "Draft tokens accepted"),
            "rejected": counter("rejected_tokens", "Draft tokens rejected"),
            "verifications": counter("verifications", "Verifications"),
            "waits": counter(
                "verification_wait_iterations", "Iterations spent waiting for residuals"
            ),
            "drafts.context": counter(
                "draft_context_tokens", "Tokens of context of drafts, summed over drafts"
            ),
            "drafts.read": counter("draft_read_tokens", "Tokens of context that drafts read"),
            "drafts.weighed": counter(
                "drafts_weighed", "Verified drafts whose share of the attention mass is known"
            ),
            "drafts.mass": counter(
                "draft_attention_mass", "Attention mass that these drafts read, 1 for all of it"
            ),
            "drafts.selection_s": counter(
                "page_selection_seconds", "Seconds of scoring and selecting pages for drafts"
            ),
            "drafts.steps": counter(
                "ngram_draft_steps", "Draft steps of requests that n-grams may propose tokens to"
            ),
            "drafts.proposed": counter("ngram_proposed_tokens", "Tokens that n-grams proposed"),
            "drafts.kept": counter("ngram_kept_tokens", "Proposed tokens that became drafts"),
        }
        self._bytes = counter("residual_bytes", "Residual bytes read from the store", "path")
        self._hits = counter("prefix_hit_tokens", "Prompt tokens found in the prefix cache", "tier")
        self._kept = counter(
            "prefix_kept_anchor_tokens",
            "Prompt tokens found in the prefix cache whose anchors were still in GPU memory",
            "tier",
        )
        self._accept_len = Histogram(
            "sglang:kvspec_accept_length",
            "Accepted drafts per verification",
            label,
            buckets=(0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64),
        )
        self._pages = Gauge(
            "sglang:kvspec_pages",
            "Pages by residual state",
            [*label, "state"],
            multiprocess_mode="mostrecent",
        )
        self._waiting = Gauge(
            "sglang:kvspec_requests_waiting_for_pages",
            "Queued requests while the first in the queue waits for pages",
            label,
            multiprocess_mode="mostrecent",
        )
        self._retracted = counter("retracted_requests", "Requests retracted", "reason")
        self._link = Gauge(
            "sglang:kvspec_link_bytes_per_second",
            "Measured bytes per second of residual fetches",
            label,
            multiprocess_mode="mostrecent",
        )
        self._iteration = Gauge(
            "sglang:kvspec_iteration_seconds",
            "Measured seconds per iteration or round",
            label,
            multiprocess_mode="mostrecent",
        )
        self._bits = Gauge(
            "sglang:kvspec_anchor_bits_per_element",
            "Anchor bits per K or V element, metadata included",
            label,
            multiprocess_mode="mostrecent",
        )

    def publish(
        self, counters: SpecCounters, kv: PagedKVCache, speeds: Speeds, pressure: Pressure
    ) -> None:
        """Export what happened since the last call."""
        name = self._model_name
        for field_name, metric in self._counters.items():
            value_of = attrgetter(field_name)
            metric.labels(name).inc(value_of(counters) - value_of(self._last))
        for accept_len, count in counters.accept_histogram.items():
            for _ in range(count - self._last.accept_histogram[accept_len]):
                self._accept_len.labels(name).observe(accept_len)
        for tier in HIT_TIERS:
            new = counters.hit_tokens[tier] - self._last.hit_tokens[tier]
            self._hits.labels(name, tier).inc(new)
        for tier in KEPT_TIERS:
            new = counters.kept_anchors[tier] - self._last.kept_anchors[tier]
            self._kept.labels(name, tier).inc(new)
        bytes_now = (kv.residuals.bytes_fetched, kv.residuals.bytes_streamed)
        for path, now, before in zip(
            ("fetched", "streamed"), bytes_now, self._last_bytes, strict=True
        ):
            self._bytes.labels(name, path).inc(now - before)
        for state, num_pages in kv.residuals.table.counts().items():
            self._pages.labels(name, state.lower()).set(num_pages)
        self._waiting.labels(name).set(pressure.waiting)
        for reason in OPERATING_REASONS:
            num_new = pressure.retracted[reason] - self._last_retracted[reason]
            self._retracted.labels(name, reason).inc(num_new)
        self._last_retracted = Counter(pressure.retracted)
        for gauge, value in (
            (self._link, speeds.observed_link_bytes_per_s),
            (self._iteration, speeds.observed_iteration_s),
        ):
            # labels() alone would export a sample of 0.
            if value is not None:
                gauge.labels(name).set(value)
        self._bits.labels(name).set(kv.codec.anchor_bits_per_element)
        self._last_bytes = bytes_now
        self._last = SpecCounters(
            drafted=counters.drafted,
            accepted=counters.accepted,
            verifications=counters.verifications,
            waits=counters.waits,
            drafts=replace(counters.drafts),
            accept_histogram=Counter(counters.accept_histogram),
            hit_tokens=Counter(counters.hit_tokens),
            kept_anchors=Counter(counters.kept_anchors),
        )
