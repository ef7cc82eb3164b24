"""Tables of what compressors do, from results of bench_compressors.py and check_compressors.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from compressors.points import Point, front, points_of, read_places


def compressor_tables(path: Path) -> dict[str, str]:
    """Return the tables by name: none where there is no result yet."""
    if not path.exists():
        return {}
    places = read_places(path)
    return {"compressors": accepted_table(places), "compressors_front": front_table(places)}


def identity_table(path: Path) -> str:
    """Return the answers of each method of check_compressors.py that differ from plain SGLang's."""
    methods = json.loads(path.read_text(encoding="utf-8"))["settings"]["methods"]
    lines = [
        "| method | answers that differ | drafts accepted | share of the context read |",
        "|---|---|---|---|",
    ]
    for name, found in methods.items():
        if "problem" in found:
            continue
        differ = f"{found['mismatches']} of {found['answers']}"
        accepted = f"{found['accepted']} of {found['drafted']}"
        lines.append(f"| `{name}` | {differ} | {accepted} | {found['share_read']:.2f} |")
    return "\n".join(lines)


def run_table(path: Path) -> str:
    """Return the accepted drafts of one run of bench_compressors.py."""
    run = json.loads(path.read_text(encoding="utf-8"))
    title = f"{run['settings']['model']}, {run['settings']['prompt_len']:,} tokens"
    return accepted_table({title: points_of(run["figures"], "compressors.")})


def accepted_table(places: Mapping[str, list[Point]]) -> str:
    """Return the accepted drafts of each scorer and codec, by place and budget."""
    rows: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for title, points in places.items():
        for point in points:
            key = (point.method.scorer, point.method.anchors)
            rows.setdefault(key, {}).setdefault(title, []).append(point)
    budgets = sorted({p.method.budget for points in places.values() for p in points} - {1.0})
    shares = " / ".join(f"{100 * budget:g}" for budget in budgets)
    at = f"at {shares} % of the prompt, or " if shares else ""
    lines = [
        f"Accepted drafts {at}over all tokens:",
        "",
        f"| scorer | codec | {' | '.join(places)} |",
        f"|---|---|{'---|' * len(places)}",
    ]
    for (scorer, anchors), found in rows.items():
        cells = [
            " / ".join(f"{p['accepted']:.1f}" for p in _by_budget(found.get(title, [])))
            for title in places
        ]
        lines.append(f"| `{scorer}` | `{anchors}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def front_table(places: Mapping[str, list[Point]]) -> str:
    """Return the methods that no other one beats, with all of their figures, by place."""
    lines = [
        "| model and prompts | method | accepted | of all 4-bit anchors | bytes of theirs | tokens "
        "that fit, residuals on the host | only drafted anchors in HBM | tokens/s expected |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for title, points in places.items():
        for point in front(points):
            spread = point.rows["accepted"]["spread"]
            cells = (
                title,
                f"`{point.method.name}`",
                f"{point['accepted']:.2f} ± {spread:.2f}",
                f"{point['vs_dense4']:.2f}",
                f"{point['bytes_vs_dense4']:.3f}",
                f"{point['tokens_vs_plain.hosted']:.1f}x",
                f"{point['tokens_vs_plain.freed']:.1f}x",
                f"{point['tokens_per_s']:,.0f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _by_budget(points: list[Point]) -> list[Point]:
    return sorted(points, key=lambda point: point.method.budget)
