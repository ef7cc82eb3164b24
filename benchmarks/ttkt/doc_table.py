"""Tables for the documentation: times to the k-th token on a GPU, from bench_ttkt.py."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from ttkt.figures import MODES
from ttkt.points import TOKENS, Point, read_points

_RATIOS = {
    "ttkt.tt2t_vs_full": "time to the 2nd token, `split` against `full`",
    "ttkt.tt2t_vs_int4": "time to the 2nd token, `split` against `int4`",
    "ttkt.tt32t_vs_int8": "time to the 32nd token, `split` against `int8`",
}
# Tokens that the second table shows.
_SHOWN = (2, 32)


def gpu_lines(path: Path) -> str:
    """Return the tables of a record and the points beside it. Return a sentence if there is
    none."""
    points_path = path.with_suffix(".points.jsonl")
    if not path.exists() or not points_path.exists():
        return (
            f"The time to the k-th token has not been measured on a GPU: there is no `{path.name}`."
        )
    record = json.loads(path.read_text(encoding="utf-8"))
    figures = {figure["name"]: figure for figure in record["figures"]}
    points = read_points(points_path)
    links = sorted({point.full_s for point in points})
    parts = [
        f"On one {record['machine']}, medians over prompts of "
        f"{min(p.prompt_len for p in points):,} to {max(p.prompt_len for p in points):,} tokens:",
        _ratio_table(figures, links),
        _shares(figures),
        _times_table(points),
    ]
    return "\n\n".join(parts)


def _ratio_table(figures: dict[str, dict[str, Any]], links: list[float]) -> str:
    heads = ["ratio", *(f"`full` takes {s:g} s" for s in links), "all", "worst", "goal"]
    lines = [_row(heads), "|---" * len(heads) + "|"]
    for name, title in _RATIOS.items():
        if name not in figures:
            continue
        cells = [f"{name}.at_{s:g}s" for s in links] + [name, f"{name}.worst"]
        shown = [f"{figures[cell]['value']:.2f}" if cell in figures else "" for cell in cells]
        lines.append(_row([title, *shown, f"{figures[name]['baseline']:g}"]))
    return "\n".join(lines)


def _shares(figures: dict[str, dict[str, Any]]) -> str:
    """Return a sentence on equal answers, and one on kept drafts."""
    shares = [
        f"`{mode}` {figures[name]['value']:.0%}"
        for mode in MODES
        if mode != "full" and (name := f"ttkt.identical.{mode}") in figures
    ]
    text = f"Answers equal to those of `full`: {', '.join(shares)}." if shares else ""
    kept = figures.get("ttkt.accepted_at_first_verification.mean")
    drafted = figures.get("ttkt.drafted_before_first_verification.mean")
    if kept is None or drafted is None:
        return text
    return (
        f"{text} The first verification kept {kept['value']:.1f} of {drafted['value']:.1f} drafts, "
        "on average."
    )


def _times_table(points: list[Point]) -> str:
    modes = [mode for mode in MODES if any(point.mode == mode for point in points)]
    heads = ["tokens", "`full` takes", *(f"`{mode}`" for mode in modes)]
    tokens = " / ".join(f"{_ordinal(k)}" for k in _SHOWN)
    lines = [f"Seconds after the prefill until the {tokens} token was computed:", ""]
    lines += [_row(heads), "|---" * len(heads) + "|"]
    for length, full_s in sorted({(p.prompt_len, p.full_s) for p in points}):
        cells = [
            _times(
                [p for p in points if (p.mode, p.prompt_len, p.full_s) == (mode, length, full_s)]
            )
            for mode in modes
        ]
        lines.append(_row([f"{length:,}", f"{full_s:g} s", *cells]))
    return "\n".join(lines)


def _times(points: list[Point]) -> str:
    if not points:
        return ""
    places = [TOKENS.index(k) for k in _SHOWN]
    return " / ".join(f"{median(p.computed_s[at] for p in points):.2f}" for at in places)


def _ordinal(k: int) -> str:
    return f"{k}nd" if k % 10 == 2 and k % 100 != 12 else f"{k}th"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
