"""Table for the documentation: the time of a drafting server by phase, from its profile."""

from __future__ import annotations

import re
from typing import Any

PHASES = {"draft": "drafting", "verify": "verifying, housekeeping"}
# Rows of a phase. All other kernels of the phase share one row.
ROWS = {"attention": "attention", "matrix_products": "matrix products"}
_KERNEL_NAMES = re.compile(r" \([^()]*\)|, the largest of \S+ ms between .*(?=\.$)")


def profile_lines(profile: dict[str, Any], note: str) -> list[str]:
    """Return the table as Markdown. profile: result of bench_profile.py for a server with --kvspec.
    note: note on its acceptance."""
    settings = profile["settings"]
    prefix = f"profile.{settings['point']}.{settings['system']}."
    figures = {row["name"].removeprefix(prefix): row for row in profile["figures"]}
    steps = figures["draft_steps"]["value"]
    rows = [
        f"| {note}: a round of {settings['requests']} requests at {settings['point']}, "
        f"`{settings['system']}`, {steps:.1f} draft steps | ms | floor (bytes) | times the floor |",
        "|---|---|---|---|",
    ]
    for phase, what in PHASES.items():
        own = {
            name.removeprefix(f"{phase}.").removesuffix("_ms"): row
            for name, row in figures.items()
            if name.startswith(f"{phase}.") and name != f"{phase}.gpu_ms"
        }
        idle = own.pop("idle")
        rows += [_row(f"{what}: {shown}", own.pop(key)) for key, shown in ROWS.items()]
        rows.append(f"| {what}: other kernels | {sum(r['value'] for r in own.values()):.1f} | | |")
        rows.append(_row(f"{what}: idle GPU", idle))
    rows.append(_row("the whole round", figures["round_ms"]))
    rows.append(_row("a draft step", figures["draft_step_ms"]))
    gaps = [_KERNEL_NAMES.sub("", text) for text in settings["largest_gaps_to_the_floor"]]
    return [
        *rows,
        "",
        f"Means of {figures['rounds']['value']} rounds (`benchmarks/bench_profile.py`, commit "
        f"{profile['commit'][:7]}). The profiler slows launches down. Before the profiler ran, the "
        f"server measured {figures['server.draft_iter_ms']['value']:.1f} ms a draft step and "
        f"{figures['server.verify_ms']['value']:.1f} ms a verification. The client measured "
        f"{figures['round_unprofiled_ms']['value']:.0f} ms a round (median). The largest gaps to "
        "the floor:",
        "",
        *(f"{number}. {text}" for number, text in enumerate(gaps, 1)),
    ]


def _row(what: str, figure: dict[str, Any]) -> str:
    value, floor = figure["value"], figure["baseline"]
    if not floor:
        return f"| {what} | {value:.1f} | | |"
    return f"| {what} | {value:.1f} | {floor:.1f} | {value / floor:.2f} |"
