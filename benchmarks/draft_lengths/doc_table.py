"""Table of docs/benchmarks/draft-lengths.md, from the results of bench_draft_lengths.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PLACES = {
    "bs1.eval31m": "1 request, eval-31m",
    "bs1.smollm2": "1 request, SmolLM2",
    "bs16.eval31m": "16 requests, eval-31m",
    "bs16.smollm2": "16 requests, SmolLM2",
}
WAYS = {
    "today_priced": "own acceptance, with a learnt price",
    "fixed": "best fixed length, in hindsight",
    "top_probability": "top probability, known at no cost",
    "top_probability.waits_0.03ms": "the same, 0.03 ms of waiting a step",
    "top_probability.waits_0.1ms": "the same, 0.1 ms of waiting a step",
    "top_probability.one_late": "the same, known one step late",
    "lead": "lead over the second token, known at no cost",
    "lead.waits_0.03ms": "the same, 0.03 ms of waiting a step",
    "lead.waits_0.1ms": "the same, 0.1 ms of waiting a step",
    "lead.one_late": "the same, known one step late",
    "oracle": "oracle",
}


def draft_lengths_table(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return tokens a second against the server's lengths, by policy, and by batch and model."""
    rows = {row["name"]: row for row in figures}
    lines = [f"| lengths by | {' | '.join(PLACES.values())} |", f"|---|{'---|' * len(PLACES)}"]
    for way, title in WAYS.items():
        found = [rows[f"lengths.vs_today.{way}.{place}"] for place in PLACES]
        cells = [f"{row['value']:.2f} ± {row['spread']:.2f}" for row in found]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)
