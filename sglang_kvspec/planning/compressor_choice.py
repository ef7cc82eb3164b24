"""Choice of a compressor by what a study measured: --kvspec-compressor auto."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Name in place of a scorer's where drafts read all tokens.
ALL_TOKENS = "all"
# Share of the acceptance over all anchors of 4 bits that a method should keep.
LEAST_ACCEPTED = 0.9


@dataclass(frozen=True, slots=True)
class Measured:
    """Drafts of one method in a study of several models and prompts.

    scorer: a name of --kvspec-compressor with its default options, or ALL_TOKENS. codec, bits: of
    the anchors. budget: share of a prompt's pages that drafts read. Then by place, a model with
    prompts, in the study's order: accepted: mean accept length. vs_dense4: the same, relative to
    all anchors of uniform4 in 4 bits. bytes_vs_dense4: bytes that a draft reads, likewise.
    """

    scorer: str
    codec: str
    bits: int
    budget: float
    accepted: tuple[float, ...]
    vs_dense4: tuple[float, ...]
    bytes_vs_dense4: tuple[float, ...]


def best_first(methods: Iterable[Measured]) -> list[Measured]:
    """Return the scorers among methods. First those that keep LEAST_ACCEPTED at every place, from
    the fewest bytes on; then all others, from the largest acceptance on. The place that is worst
    for a method decides. Hundredths of bytes do not count: of equal ones, the larger acceptance
    does."""
    return sorted(
        (each for each in methods if each.scorer != ALL_TOKENS),
        key=lambda each: (
            min(each.vs_dense4) < LEAST_ACCEPTED,
            round(max(each.bytes_vs_dense4), 2) if min(each.vs_dense4) >= LEAST_ACCEPTED else 0.0,
            -min(each.vs_dense4),
            each.scorer,
        ),
    )
