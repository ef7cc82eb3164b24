"""Start-up checks of SGLang's own numbers: sizes, lengths and the share of memory."""

from __future__ import annotations

from typing import Any

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError

# SGLang keeps one token of a context for itself, and subtracts six from a pool for a prompt.
LEAST_CONTEXT = 2
_POOL_MARGIN = 6


def check_sizes(config: KVSpecConfig, kwargs: dict[str, Any], page_size: int) -> None:
    """Raise ConfigError for a size with which the server would fail after loading the model."""
    for name, least, reason in (
        ("max_running_requests", 1, "no request could run"),
        ("max_queued_requests", 1, "no request could wait"),
        ("prefill_max_requests", 1, "no prompt could be computed"),
        (
            "max_total_tokens",
            _least_pool(config, page_size),
            "whole pages must hold a prompt and twice the tokens of a verification",
        ),
        ("context_length", LEAST_CONTEXT, "no prompt could be served"),
        ("tp_size", 1, "no rank could serve"),
        ("dp_size", 1, "no replica could serve"),
    ):
        value = kwargs.get(name)
        if value is not None and value < least:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} cannot be combined with --kvspec (allowed: "
                f"{least} or more, or leave it unset): {reason}"
            )
    share = kwargs.get("mem_fraction_static")
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"--mem-fraction-static {share:g} cannot be combined with --kvspec (allowed: above 0 "
            "and at most 1, or leave it unset)"
        )
    chunk = kwargs.get("chunked_prefill_size")
    # 0 or less turns chunks off.
    if chunk is not None and chunk > 0 and chunk % page_size:
        raise ConfigError(
            f"--chunked-prefill-size {chunk} cannot be combined with --kvspec (allowed: multiples "
            f"of the page size {page_size}, or -1 for prompts in one piece)"
        )


def _least_pool(config: KVSpecConfig, page_size: int) -> int:
    """Return the tokens of the smallest pool from which SGLang admits a prompt of one token."""
    reserved = 2 * (config.max_draft_len + 1)
    return -(-(reserved + _POOL_MARGIN) // page_size) * page_size
