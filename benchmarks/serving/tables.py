"""The serving figures as tables for the README, and as a plot.

python benchmarks/serving/tables.py    # after bench_serving.py; without its results: nothing
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "serving_h200.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- serving:begin -->", "<!-- serving:end -->"
SYSTEMS = ("bf16", "fp8", "exact", "int8")

# Name of the figure: what it is, and what it should be.
HEADLINES = {
    "serve.8b.32k.bs16.draft_iter_ms": ("8B shape, 16 x 32K: ms a draft iteration", "<= 10.5"),
    "serve.8b.32k.bs16.exact.vs_bf16": ("8B shape, 16 x 32K: decoding, `exact`", ">= 1.45"),
    "serve.8b.32k.bs16.int8.vs_bf16": ("8B shape, 16 x 32K: decoding, `int8`", ">= 1.6"),
    "serve.8b.32k.saturation.int8.vs_bf16": (
        "8B shape, 32K, each at its best: decoding, `int8`",
        ">= 2.0",
    ),
    "serve.8b.4k.saturation.exact.vs_bf16": (
        "8B shape, 4K, each at its best: decoding, `exact`",
        ">= 0.97",
    ),
    "serve.32b.32k.saturation.vs_bf16": (
        "32B shape, 32K, each at its best: decoding, the better target",
        ">= 1.7",
    ),
    "start.extra_seconds": ("seconds that --kvspec adds to the start of a server", "<= 20"),
}
_POINT = re.compile(
    r"serve\.(?P<place>.+)\.bs(?P<at>\d+)\.(?P<system>\w+)"
    r"\.(decode\.tokens_per_s|end_to_end\.output_tokens_per_s)"
)

Figures = dict[str, dict[str, Any]]


def main() -> None:
    if not RESULT.exists():
        print(f"{RESULT} does not exist: nothing was measured, so nothing is written")
        return
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    figures = {figure["name"]: figure for figure in record["figures"]}
    note = record["settings"]["acceptance"]
    block = "\n".join(lines(figures, note, record["machine"]))
    text = README.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{README.name} needs {BEGIN} and {END} once each")
    head, rest = text.split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    draw(figures, note, RESULT.with_suffix(".png"))


def lines(figures: Figures, note: str, machine: str) -> list[str]:
    """Markdown, the note on acceptance first and in the head of every table."""
    return [
        f"Serving on one {machine}, live servers driven by `sglang.bench_serving` "
        f"(`benchmarks/bench_serving.py`): {note}.",
        "",
        *headlines(figures, note),
        "",
        *points(figures, note),
        "",
        "![decode rate by concurrency](benchmarks/results/serving_h200.png)",
    ]


def headlines(figures: Figures, note: str) -> list[str]:
    """What was asked for and has been measured."""
    rows = [f"| {_short(note)} | value | asked for | plain bf16 |", "|---|---|---|---|"]
    for name, (what, target) in HEADLINES.items():
        if name not in figures:
            continue
        figure = figures[name]
        ratio = "vs_bf16" in name
        base = f"{figure['baseline']:.{0 if ratio else 1}f}" if figure["baseline"] else ""
        unit = (" tokens/s" if ratio else "") if base else ""
        value = _value(figure, ".2f" if ratio else ".1f")
        rows.append(f"| {what} | {value}{' x' if ratio else ''} | {target} | {base}{unit} |")
    return rows


def points(figures: Figures, note: str) -> list[str]:
    """A row per point and system."""
    head = (
        _short(note),
        "at once",
        "system",
        "decode tokens/s",
        "x bf16",
        "tokens/s with prefill",
        "x bf16",
        "ITL p50/p99 (ms)",
        "TTFT mean/p99 (ms)",
        "HBM (GiB)",
    )
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for place, at, system, name in measured(figures):

        def cell(key: str, form: str, name: str = name) -> str:
            figure = figures.get(f"{name}.{key}")
            return "" if figure is None else _value(figure, form)

        # With a cached prompt the first token says nothing of prefill.
        kind = "end_to_end" if f"{name}.end_to_end.ttft_mean_ms" in figures else "decode_pass"
        cold = kind == "end_to_end"
        cells = (
            place,
            str(at),
            system,
            cell("decode.tokens_per_s", ".0f"),
            cell("vs_bf16", ".2f"),
            cell("end_to_end.output_tokens_per_s", ".0f"),
            cell("vs_bf16_end_to_end", ".2f"),
            f"{cell(f'{kind}.itl_p50_ms', '.1f')}/{cell(f'{kind}.itl_p99_ms', '.1f')}",
            f"{cell(f'{kind}.ttft_mean_ms', '.0f')}/{cell(f'{kind}.ttft_p99_ms', '.0f')}"
            if cold
            else "",
            cell("hbm_gib", ".1f"),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def measured(figures: Figures) -> Iterator[tuple[str, int, str, str]]:
    """Place, concurrency, system and prefix of every point with a rate, in order."""
    found = [match for name in figures if (match := _POINT.fullmatch(name))]
    places = list(dict.fromkeys(match["place"] for match in found))
    keys = {(m["place"], int(m["at"]), m["system"]) for m in found}
    order = sorted(keys, key=lambda key: (places.index(key[0]), key[1], SYSTEMS.index(key[2])))
    for place, at, system in order:
        yield place, at, system, f"serve.{place}.bs{at}.{system}"


def draw(figures: Figures, note: str, path: Path) -> None:
    """Decode rate against concurrency, a panel per model and context, to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    places = list(dict.fromkeys(place for place, _, _, _ in measured(figures)))
    if not places:
        return
    size = (1 + 3.2 * len(places), 3.6)
    figure, axes = plt.subplots(1, len(places), figsize=size, dpi=150, squeeze=False)
    for axis, panel in zip(axes[0], places, strict=True):
        for shown in SYSTEMS:
            found = [
                (at, figures[f"{name}.decode.tokens_per_s"]["value"])
                for place, at, system, name in measured(figures)
                if (place, system) == (panel, shown) and f"{name}.decode.tokens_per_s" in figures
            ]
            if found:
                axis.plot(*zip(*found, strict=True), marker="o", markersize=3, label=shown)
        axis.set(title=panel, xlabel="requests at once", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    axes[0][0].set_ylabel("decode tokens/s")
    figure.suptitle(note, fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _value(figure: dict[str, Any], form: str) -> str:
    value, spread = figure["value"], figure["spread"]
    return f"{value:{form}}" if spread is None else f"{value:{form}} ± {spread:{form}}"


def _short(note: str) -> str:
    """For the head of a table."""
    return note.split(" from ")[0]


if __name__ == "__main__":
    main()
