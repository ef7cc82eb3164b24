"""Table of docs/benchmarks/ngram.md, from the results of bench_ngram.py."""

from __future__ import annotations

import json
from pathlib import Path

KINDS = {
    "edit": "a file again, changed",
    "quote": "a page again",
    "code": "the rest of a file",
    "prose": "the rest of a page",
}
SOURCES = {"text": "real text", "greedy": "greedy", "sampled": "temperature 0.8"}


def ngram_table(path: Path) -> str:
    """Return drafts of a step, by kind of prompt, and by model and source of the drafts."""
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in result["figures"]}
    models = result["settings"]["models"]
    columns = [(model, source) for model in models for source in SOURCES]
    heads = [f"{model}, {SOURCES[source]}" for model, source in columns]
    lines = [f"| drafts are | {' | '.join(heads)} |", f"|---|{'---|' * len(columns)}"]
    for kind, title in KINDS.items():
        found = [
            rows[f"ngram.tokens_per_step.{kind}.{source}.{model}"] for model, source in columns
        ]
        cells = [f"{row['value']:.2f} ± {row['spread']:.2f}" for row in found]
        lines.append(f"| {title} (`{kind}`) | {' | '.join(cells)} |")
    return "\n".join(lines)
