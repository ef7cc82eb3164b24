"""The one parsed, frozen configuration of a KVSpec server."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from sglang_kvspec.core.compressor import AUTO_COMPRESSOR, Compressor, parse_compressor
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flag_needs import DEFAULT_PAGE_SIZE, MODEL_DRAFTERS
from sglang_kvspec.core.flags import (
    AUTO_BUDGET,
    AUTO_DRAFT_LEN,
    AUTO_DRAFT_VIEW,
    AUTO_SCHEDULE,
    AUTO_WEIGHTS,
    DEFAULT_PREFIX_GB,
    DEFAULTS,
    FLAGS,
    MAX_DRAFT_LEN,
    MAX_HOST_GB,
    MOST_RECENT_PAGES,
    Arithmetic,
    Kernels,
    Stream,
    Target,
    Weights,
)
from sglang_kvspec.core.network_flags import (
    AUTO_RESIDUAL,
    DEFAULT_PREFIX_WAIT_MS,
    DEFAULT_PUBLISH_GBPS,
    LOOPBACK,
    ExactResidual,
    Transfer,
)

# Modules that read a configuration also import the types and limits of flags from here.
__all__ = [
    "AUTO_BUDGET",
    "AUTO_DRAFT_LEN",
    "AUTO_DRAFT_VIEW",
    "AUTO_RESIDUAL",
    "AUTO_SCHEDULE",
    "AUTO_WEIGHTS",
    "DEFAULT_PAGE_SIZE",
    "DEFAULT_PREFIX_GB",
    "LOOPBACK",
    "LOSSY_TRANSFERS",
    "MAX_DRAFT_LEN",
    "MAX_HOST_GB",
    "MOST_AUTO_DRAFTS",
    "MOST_AUTO_DRAFTS_OFFLOADED",
    "MOST_RECENT_PAGES",
    "ExactResidual",
    "KVSpecConfig",
    "Kernels",
    "Stream",
    "Target",
    "Transfer",
    "Weights",
]

# With the pending token, as many tokens as verify kernels take at once. One more draft would cost a
# second pass over the whole KV of the request.
MOST_AUTO_DRAFTS = 31
# With residuals in host memory, each fetch should serve more drafts: two such passes.
MOST_AUTO_DRAFTS_OFFLOADED = 63
# The decode server receives other KV than was computed, so it has nothing to verify against.
LOSSY_TRANSFERS: tuple[Transfer, ...] = ("int8", "int4", "cachegen")


@dataclass(frozen=True, slots=True)
class KVSpecConfig:
    """Validated options of a server, built once from flags and then only read.

    Meaning, unit, range and default of each field are those of its flag in core/flags.py.
    """

    target: Target = DEFAULTS["target"]
    target_attention: str | None = DEFAULTS["target_attention"]
    arithmetic: Arithmetic | None = DEFAULTS["arithmetic"]
    kernels: Kernels = DEFAULTS["kernels"]
    codec: str = DEFAULTS["codec"]
    anchor_bits: int | None = DEFAULTS["anchor_bits"]
    draft_len: int | Literal["auto"] = DEFAULTS["draft_len"]
    recent_pages: int = DEFAULTS["recent_pages"]
    host_gb: float | None = DEFAULTS["host_gb"]
    residual_hbm_fraction: float = DEFAULTS["residual_hbm_fraction"]
    schedule: str = DEFAULTS["schedule"]
    drafter: str = DEFAULTS["drafter"]
    ngram_always: bool = DEFAULTS["ngram_always"]
    ngram_shared: bool = DEFAULTS["ngram_shared"]
    draft_weights: str = DEFAULTS["draft_weights"]
    draft_view: str = DEFAULTS["draft_view"]
    compressor: str | None = DEFAULTS["compressor"]
    draft_budget: float | Literal["auto"] = DEFAULTS["draft_budget"]
    stream: Stream = DEFAULTS["stream"]
    prefix_host_gb: float = DEFAULTS["prefix_host_gb"]
    prefix_hbm_fraction: float = DEFAULTS["prefix_hbm_fraction"]
    prefix_dir: str | None = DEFAULTS["prefix_dir"]
    prefix_gb: float | None = DEFAULTS["prefix_gb"]
    prefix_server: str | None = DEFAULTS["prefix_server"]
    prefix_server_keys: str | None = DEFAULTS["prefix_server_keys"]
    prefix_publish_gbps: float | None = DEFAULTS["prefix_publish_gbps"]
    prefix_wait_ms: float | None = DEFAULTS["prefix_wait_ms"]
    transfer: Transfer = DEFAULTS["transfer"]
    exact_residual: ExactResidual = DEFAULTS["exact_residual"]
    link_gbps: float | None = DEFAULTS["link_gbps"]
    transfer_host: str = DEFAULTS["transfer_host"]
    transfer_keys: str | None = DEFAULTS["transfer_keys"]

    def __post_init__(self) -> None:
        for flag in FLAGS:
            flag.check_value(getattr(self, flag.option))
        for flag in FLAGS:
            flag.check_needs(self)

    @property
    def max_draft_len(self) -> int:
        """Most tokens a request may draft before it must verify."""
        if not self.drafts:
            return 0
        if self.draft_len == AUTO_DRAFT_LEN:
            return MOST_AUTO_DRAFTS_OFFLOADED if self.host_gb else MOST_AUTO_DRAFTS
        return int(self.draft_len)

    @property
    def weight_checkpoint(self) -> str | None:
        """Return the folder of a checkpoint that drafts read, None for weights of the model."""
        return None if self.draft_weights in get_args(Weights) else self.draft_weights

    @property
    def copies_weights(self) -> bool:
        """Return True if drafts read weights in 4 bits. `auto` must have been decided."""
        assert self.draft_weights != AUTO_WEIGHTS, "the weights of drafts are not decided yet"
        return self.draft_weights != "target"

    @property
    def asked_budget(self) -> float | None:
        """Return the asked share of pages that drafts read, None for auto."""
        return None if self.draft_budget == AUTO_BUDGET else float(self.draft_budget)

    @property
    def parsed_compressor(self) -> Compressor | None:
        """Return the method that chooses what drafts read, None for none. `auto` must have been
        decided."""
        assert self.compressor != AUTO_COMPRESSOR, "the compressor is not decided yet"
        return None if self.compressor is None else parse_compressor(self.compressor)

    @property
    def frees_anchors(self) -> bool:
        """Return True if anchors of pages that no draft reads are freed."""
        if self.compressor is None or self.compressor == AUTO_COMPRESSOR:
            return False
        return not parse_compressor(self.compressor).keep_anchors

    @property
    def packs_residuals(self) -> bool:
        """Return True if residuals are packed outside of the KV cache. `auto` must have been
        decided."""
        assert self.exact_residual != AUTO_RESIDUAL, "the form of residuals is not decided yet"
        return self.exact_residual == "packed"

    @property
    def keeps_prefixes(self) -> bool:
        """Return True if prefixes outlive their place in the KV cache."""
        return bool(self.prefix_host_gb) or bool(self.prefix_dir or self.prefix_server)

    @property
    def prefix_disk_gb(self) -> float:
        return DEFAULT_PREFIX_GB if self.prefix_gb is None else self.prefix_gb

    @property
    def publish_gbps(self) -> float:
        asked = self.prefix_publish_gbps
        return DEFAULT_PUBLISH_GBPS if asked is None else asked

    @property
    def prefix_wait_s(self) -> float:
        asked = self.prefix_wait_ms
        return (DEFAULT_PREFIX_WAIT_MS if asked is None else asked) / 1000

    @property
    def drafts(self) -> bool:
        return self.draft_len != 0 and not self.is_lossy

    @property
    def drafts_on_anchors(self) -> bool:
        """Return True if the model itself makes all drafts, over anchors."""
        return self.drafts and self.drafter in MODEL_DRAFTERS

    @property
    def is_lossy(self) -> bool:
        """Return True if decode servers get other KV than the prefill server computed."""
        return self.transfer in LOSSY_TRANSFERS

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> KVSpecConfig:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown kvspec option {unknown[0]!r}, allowed: {sorted(known)}")
        return cls(**values)
