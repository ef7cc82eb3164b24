"""Conditions that a flag has on other flags, on SGLang's arguments and on the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_kvspec.core.compressor import GENERATED_SHARE
from sglang_kvspec.core.errors import ConfigError, KVSpecError, UnsupportedError

# A KVSpecConfig; its module imports this one.
Settings = Any
DEFAULT_PAGE_SIZE = 64
DISAGGREGATION_ROLES = ("prefill", "decode")
# Values of --kvspec-drafter with which the model drafts over anchors.
MODEL_DRAFTERS = ("self", "ngram")


@dataclass(frozen=True, slots=True)
class Server:
    """SGLang's arguments and the machine that a server's flags must fit.

    arguments: SGLang's, by name; unset arguments may be absent. memory_gib: host memory of this
    machine.
    """

    arguments: Mapping[str, Any]
    memory_gib: float


@dataclass(frozen=True, slots=True)
class Need:
    """Condition of a flag on the other flags, checked unless the flag has its default.

    sentence: refusal, a format string over `flag`, `value` and `config`. note: the need in the
    table of flags.
    """

    is_met: Callable[[Settings], bool]
    sentence: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ServerNeed:
    """Condition of a flag on a server, checked unless the flag has its default.

    sentence: refusal, a format string over `flag`, `value`, `config` and `server`. note: the need
    in the table of flags. only_on_gpu: CPU servers are not checked.
    """

    is_met: Callable[[Settings, Server], bool]
    sentence: str
    note: str = ""
    error: type[KVSpecError] = UnsupportedError
    only_on_gpu: bool = False


def flag_name(option: str) -> str:
    """Return the flag of a KVSpecConfig field: draft_len is --kvspec-draft-len."""
    return "--kvspec-" + option.replace("_", "-")


def any_of(*options: str, why: str = "") -> Need:
    """Return the need for at least one of these options. why: end of the refusal."""

    def is_met(config: Settings) -> bool:
        return any(getattr(config, option) for option in options)

    flags = [flag_name(option) for option in options]
    return Need(
        is_met,
        f"{{flag}} {{value}} has no effect without {' or '.join(flags)}{why}",
        note=f"needs {' or '.join(f'`{flag}`' for flag in flags)}",
    )


def has_exact_target(config: Settings) -> bool:
    return bool(config.target == "exact")


def has_uniform_anchors(config: Settings) -> bool:
    """Return True if anchors are uniform4 codes of 4 bits."""
    return bool(config.codec == "uniform4" and config.anchor_bits in (None, 4))


def can_verify(config: Settings) -> bool:
    """Return False if a lossy transfer leaves explicit drafts nothing to verify against."""
    return not config.is_lossy or config.draft_len == 0


def drafts_in_rounds(config: Settings) -> bool:
    return bool(config.schedule != "staggered")


def drafts_by_itself(config: Settings) -> bool:
    """Return True if the model itself makes all drafts, over anchors."""
    return config.drafter in MODEL_DRAFTERS


def drafts_with_ngrams(config: Settings) -> bool:
    return bool(config.drafter == "ngram")


def drafts_at_all(config: Settings) -> bool:
    return bool(config.draft_len != 0)


def has_view_of_its_drafts(config: Settings) -> bool:
    """Return False if a draft view is chosen for drafts that read no pages."""
    return drafts_by_itself(config) or config.draft_view in ("auto", "all")


def has_no_view(config: Settings) -> bool:
    return bool(config.draft_view == "auto")


def verifies_without_freed_anchors(config: Settings) -> bool:
    return not config.frees_anchors or has_exact_target(config)


def can_pack_residuals(config: Settings) -> bool:
    """Return True if anchors tell what packed residuals leave out."""
    return has_exact_target(config) and has_uniform_anchors(config)


def stores_no_freed_anchors(config: Settings) -> bool:
    return not config.frees_anchors or not config.keeps_prefixes


def has_budget_that_frees_anchors(config: Settings) -> bool:
    """Return False where a compressor is to free anchors, and there is room for all of them."""
    budget = config.asked_budget
    return not config.frees_anchors or budget is None or budget < 1 - GENERATED_SHARE


def reads_some_pages(config: Settings) -> bool:
    return bool(config.draft_view != "all")


def is_split_over_servers(config: Settings, server: Server) -> bool:
    return server.arguments.get("disaggregation_mode") in DISAGGREGATION_ROLES


def frees_no_anchors_that_it_sends(config: Settings, server: Server) -> bool:
    return not config.frees_anchors or not is_split_over_servers(config, server)


def is_not_decode_server(config: Settings, server: Server) -> bool:
    return server.arguments.get("disaggregation_mode") != "decode"


def stores_or_sends_residuals(config: Settings, server: Server) -> bool:
    """Return True if residuals leave the KV cache, to prefix tiers or in split transfers."""
    sends = config.transfer == "split" and is_split_over_servers(config, server)
    return bool(sends or config.keeps_prefixes)


def holds_residuals_elsewhere(config: Settings, server: Server) -> bool:
    """Return True if residuals leave GPU memory, or the KV cache of a CPU."""
    return bool(config.host_gb) or stores_or_sends_residuals(config, server)


def has_prefix_cache(config: Settings, server: Server) -> bool:
    return not server.arguments.get("disable_radix_cache")


def has_one_replica(config: Settings, server: Server) -> bool:
    return server.arguments.get("dp_size") in (None, 1)


def fits_host(config: Settings, server: Server) -> bool:
    return (config.host_gb or 0) <= server.memory_gib


def fits_prefix_host(config: Settings, server: Server) -> bool:
    return bool(config.prefix_host_gb <= server.memory_gib)


def prefills_one_request(config: Settings, server: Server) -> bool:
    """Return False if residuals are in host memory and a prefill may take several requests."""
    return not config.host_gb or server.arguments.get("prefill_max_requests") in (None, 1)


def is_not_deterministic(config: Settings, server: Server) -> bool:
    return not server.arguments.get("enable_deterministic_inference")


def is_not_contradicted(config: Settings, server: Server) -> bool:
    """Return False for fast arithmetic where SGLang's flag asks for the other."""
    return config.arithmetic != "fast" or is_not_deterministic(config, server)


def has_default_pages(config: Settings, server: Server) -> bool:
    return server.arguments.get("page_size") in (None, DEFAULT_PAGE_SIZE)


# Needs that several flags have.
SPLIT_OVER_SERVERS = ServerNeed(
    is_split_over_servers,
    "{flag} {value} has no effect without --disaggregation-mode prefill or decode",
    error=ConfigError,
)
IN_HOST_MEMORY = (
    "{flag} {value} is more than the host memory of this machine (allowed: at most "
    "{server.memory_gib:.1f} GiB)"
)
PREFIX_TIER = (
    ServerNeed(
        is_not_decode_server,
        "{flag} {value} has no effect on a decode server, which keeps no prefixes: set {flag} on "
        "the prefill server",
    ),
    ServerNeed(
        has_prefix_cache,
        "--disable-radix-cache cannot be combined with {flag} (allowed: leave it unset)",
    ),
    # Each replica would take the whole budget, which is meant for all ranks of a machine.
    ServerNeed(
        has_one_replica,
        "--dp-size {server.arguments[dp_size]} cannot be combined with {flag} (allowed: 1)",
    ),
)
