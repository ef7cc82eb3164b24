"""Compressor of a server: what `auto` is, and what a GPU does not serve."""

from __future__ import annotations

import logging
from dataclasses import replace

from sglang_kvspec.core.compressor import AUTO_COMPRESSOR, parse_compressor
from sglang_kvspec.core.config import KVSpecConfig, Target
from sglang_kvspec.core.errors import ConfigError, UnsupportedError
from sglang_kvspec.planning.compressor_choice import best_first
from sglang_kvspec.planning.measured_compressors import MEASURED
from sglang_kvspec.scorers.making import allocation_of, make_scorer

logger = logging.getLogger(__name__)


def with_compressor(config: KVSpecConfig, *, on_gpu: bool) -> KVSpecConfig:
    """Return the configuration with the compressor and the budget that `auto` chooses, and log
    them. A budget that was asked for stays.

    Raises ConfigError for options that a scorer does not take, and UnsupportedError for a
    compressor that serves on a CPU only.
    """
    if config.compressor is None:
        return config
    if config.compressor != AUTO_COMPRESSOR:
        _check_served(config.compressor, config.target, on_gpu=on_gpu)
        return config
    chosen = next(
        each for each in best_first(MEASURED) if _serves(each.scorer, config.target, on_gpu=on_gpu)
    )
    asked = config.asked_budget
    budget = chosen.budget if asked is None else asked
    logger.info(
        "KVSpec: compressor: %s with --kvspec-draft-budget %g; in a study with %g it kept at least "
        "%.3f of the accepted drafts of all 4-bit anchors, for at most %.3f of their bytes",
        chosen.scorer,
        budget,
        chosen.budget,
        min(chosen.vs_dense4),
        max(chosen.bytes_vs_dense4),
    )
    return replace(config, compressor=chosen.scorer, draft_budget=budget)


def _check_served(text: str, target: Target, *, on_gpu: bool) -> None:
    """Raise ConfigError for wrong options, and UnsupportedError for what only a CPU does."""
    compressor = parse_compressor(text)
    scorer = make_scorer(compressor)
    needs = scorer.needs
    keeps_all = getattr(scorer, "keeps_whole_heads", False)
    if keeps_all and allocation_of(compressor) == "same":
        raise ConfigError(
            f"--kvspec-compressor {compressor.name} keeps all pages of some heads, so it cannot be "
            "combined with heads=same or keep_anchors=false (allowed: heads=head)"
        )
    if not on_gpu:
        return
    for what, only_cpu in (
        ("chooses single tokens with by=tokens", compressor.by == "tokens"),
        (f"reads prompts twice at --kvspec-target {target}", needs.repeats and target != "exact"),
        ("scores tokens again after each verification", needs.drafting),
    ):
        if only_cpu:
            raise UnsupportedError(
                f"--kvspec-compressor {compressor.name} {what} and serves on a CPU only (allowed "
                "on a GPU: methods that score pages at the prefill, such as snapkv)"
            )


def _serves(name: str, target: Target, *, on_gpu: bool) -> bool:
    """Return whether `auto` may take a scorer: one that needs no file, on a GPU only what a GPU
    shows it, and no second prefill, whose price the study does not count."""
    try:
        _check_served(name, target, on_gpu=on_gpu)
    except (ConfigError, UnsupportedError):
        return False
    return not make_scorer(parse_compressor(name)).needs.repeats
