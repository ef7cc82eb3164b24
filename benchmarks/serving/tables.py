"""Tables and a plot of the serving figures, with a table of a profile beside them.

python benchmarks/doc_tables.py    # after bench_serving.py
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serving.identity import PREFIX, read_identity
from serving.plots import Curves, draw_curves
from serving.profile_table import profile_lines
from serving.systems import SYSTEMS

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "serving_h200.json"
DETERMINISTIC = ROOT / "benchmarks" / "results" / "identity_deterministic_h200.json"
# Result of a run with --control.
CONTROL = ROOT / "benchmarks" / "results" / "identity_control_h200.json"
PROFILE = ROOT / "benchmarks" / "results" / "profile_8b_32k_exact.json"
WIDTH = 100

# Title and goal of figures, by name.
HEADLINES = {
    "serve.8b.32k.bs16.draft_iter_ms": ("8B shape, 16 x 32K: ms a draft step", "<= 10.5"),
    "serve.8b.32k.bs16.exact.vs_bf16": ("8B shape, 16 x 32K: decoding, `exact`", ">= 1.45"),
    "serve.8b.32k.bs16.int8.vs_bf16": ("8B shape, 16 x 32K: decoding, `int8`", ">= 1.6"),
    "serve.8b.32k.saturation.int8.vs_bf16": (
        "8B shape, 32K, fastest measured concurrency of each system: decoding, `int8`",
        ">= 2.0",
    ),
    "serve.8b.4k.saturation.exact.vs_bf16": (
        "8B shape, 4K, fastest measured concurrency of each system: decoding, `exact`",
        ">= 0.97",
    ),
    "serve.32b.32k.saturation.vs_bf16": (
        "32B shape, 32K, fastest measured concurrency of each system: decoding, the better target",
        ">= 1.7",
    ),
    "start.extra_seconds": ("seconds that --kvspec adds to the start of a server", "<= 20"),
}
# Settings of plain SGLang: flags of systems.py, and what SGLang selects by itself.
BASELINE = (
    "Plain SGLang (`bf16`) runs FlashInfer with pages of 1 token and overlap scheduling. SGLang's "
    "own choice is FA3, whose wheel was not available."
)
# Comparisons of answers, by the name of the figure behind identity.gpu or
# identity.gpu.deterministic.
COMPARED = {
    "mismatches_vs_draft_off": "`exact` against drafting off",
    "mismatches_vs_draft_off.without_logprobs": "`exact` against drafting off, without "
    "log-probabilities",
    "differences_to_plain": "`exact` against plain SGLang",
    "draft_off_differences_to_plain": "drafting off against plain SGLang",
    "plain_differences_to_itself": "plain SGLang against plain SGLang with fewer requests at once",
}
# Part of a figure's unit with its number of requests or starts.
_DETAIL = re.compile(r", (at|median of) \d[^,]*")
_POINT = re.compile(
    r"serve\.(?P<place>.+)\.bs(?P<at>\d+)\.(?P<system>\w+)"
    r"\.(decode\.tokens_per_s|end_to_end\.output_tokens_per_s)"
)

Figures = dict[str, dict[str, Any]]


def block() -> str:
    """Return the tables, with a note on how they were measured. Return a sentence if nothing was
    measured."""
    if not RESULT.exists():
        return f"Nothing was measured: there is no `{RESULT.name}`."
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    figures = {figure["name"]: figure for figure in record["figures"]}
    settings = record["settings"]
    found = lines(figures, settings["acceptance"], record["machine"])
    if "identity" in settings:
        found += ["", *identity(figures, settings["identity"])]
    if DETERMINISTIC.exists():
        strict = read_identity(DETERMINISTIC)
        by_name = {figure.name: asdict(figure) for figure in strict.figures}
        found += ["", *identity(by_name, strict.settings, "deterministic.")]
    if CONTROL.exists():
        control = read_identity(CONTROL)
        of_itself = f"{PREFIX}plain_differences_to_itself"
        by_name = {f.name: asdict(f) for f in control.figures if f.name.startswith(of_itself)}
        found += ["", *identity(by_name, control.settings)]
    if PROFILE.exists():
        profile = json.loads(PROFILE.read_text(encoding="utf-8"))
        found += ["", *profile_lines(profile, _short(profile["settings"]["acceptance"]))]
    return "\n".join(part for line in found for part in wrapped(line))


def draw() -> None:
    """Draw the decode rate by concurrency beside the result, if there is one."""
    if RESULT.exists():
        record = json.loads(RESULT.read_text(encoding="utf-8"))
        figures = {figure["name"]: figure for figure in record["figures"]}
        note = record["settings"]["acceptance"]
        draw_curves(curves(figures), note, RESULT.with_suffix(".png"))


def lines(figures: Figures, note: str, machine: str) -> list[str]:
    """Return Markdown, with the note on acceptance first and in the head of every table."""
    return [
        f"Serving on one {machine}, live servers driven by `sglang.bench_serving` "
        f"(`benchmarks/bench_serving.py`): {note}. {BASELINE} Rates cover the time in which all "
        "requests decode, with cached prompts. A rate's ± is the 95 % half width over eight parts "
        "of this time. HBM is the memory in use that nvidia-smi reports after the measurement.",
        "",
        *headlines(figures, note),
        "",
        *points(figures, note),
    ]


def wrapped(line: str) -> list[str]:
    """Wrap prose to the line length of a page. A row of a table stays one line."""
    if not line or line.startswith(("|", "!")):
        return [line]
    return textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)


def headlines(figures: Figures, note: str) -> list[str]:
    """Return the table of figures that have a goal and were measured."""
    rows = [f"| {_short(note)} | value | goal | plain bf16 |", "|---|---|---|---|"]
    for name, (what, target) in HEADLINES.items():
        if name not in figures:
            continue
        figure = figures[name]
        ratio = "vs_bf16" in name
        base = f"{figure['baseline']:.{0 if ratio else 1}f}" if figure["baseline"] else ""
        unit = (" tokens/s" if ratio else "") if base else ""
        value = _value(figure, ".2f" if ratio else ".1f")
        if detail := _DETAIL.search(figure["unit"]):
            what += detail[0]
        rows.append(f"| {what} | {value}{' x' if ratio else ''} | {target} | {base}{unit} |")
    return rows


def points(figures: Figures, note: str) -> list[str]:
    """Return a table with a row per point and system. Columns without a measurement are left
    out."""
    columns = (
        _short(note),
        "requests",
        "system",
        "decode tokens/s",
        "x bf16",
        "tokens/s with prefill",
        "x bf16",
        "kept/drafted",
        "ITL p50/p99 (ms)",
        "TTFT mean/p99 (ms)",
        "HBM (GiB)",
        "tokens fit",
    )
    rows = [_point_cells(figures, *point) for point in measured(figures)]
    shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return [
        f"| {' | '.join(columns[i] for i in shown)} |",
        "|" + "---|" * len(shown),
        *(f"| {' | '.join(row[i] for i in shown)} |" for row in rows),
    ]


def _point_cells(figures: Figures, place: str, at: int, system: str, name: str) -> tuple[str, ...]:
    def cell(key: str, form: str) -> str:
        figure = figures.get(f"{name}.{key}")
        return "" if figure is None else _value(figure, form)

    def pair(first: str, second: str, form: str) -> str:
        found = cell(first, form), cell(second, form)
        return "/".join(found) if all(found) else ""

    # With a cached prompt, the time to the first token says nothing about prefill.
    cold = f"{name}.end_to_end.ttft_mean_ms" in figures
    kind = "end_to_end" if cold else "decode_pass"
    return (
        place,
        str(at),
        system,
        cell("decode.tokens_per_s", ".0f"),
        cell("vs_bf16", ".2f"),
        cell("end_to_end.output_tokens_per_s", ".0f"),
        cell("vs_bf16_end_to_end", ".2f"),
        pair("accepted", "drafted", ".1f"),
        pair(f"{kind}.itl_p50_ms", f"{kind}.itl_p99_ms", ".1f"),
        pair(f"{kind}.ttft_mean_ms", f"{kind}.ttft_p99_ms", ".0f") if cold else "",
        cell("hbm_gib", ".1f"),
        cell("max_total_num_tokens", ",.0f"),
    )


def identity(figures: Figures, settings: dict[str, Any], kind: str = "") -> list[str]:
    """Return a table of how many answers differ from those that they are compared with, and how
    close the two tokens were where answers differ.

    kind: "deterministic." if all servers ran with --enable-deterministic-inference.
    """
    flag = "all with `--enable-deterministic-inference`, " if kind else ""
    commit = settings["measured_at"].split()[0][:7]
    rows = [
        f"| acceptance is real: {settings['model']}, {settings['prompts']} prompts of "
        f"{settings['prompt_tokens']} tokens, {settings['new_tokens']} greedy tokens each, bf16, "
        f"`exact`, {flag}commit {commit}; comparison | answers that differ | largest "
        "gap, log-probability | beyond a tie |",
        "|---|---|---|---|",
    ]
    for key, what in COMPARED.items():
        name = f"{PREFIX}{kind}{key}"
        count = figures.get(name)
        if count is not None:
            gap, beyond = (figures.get(f"{name}.{end}") for end in ("largest_gap", "beyond_a_tie"))
            largest = "" if gap is None else _value(gap, ".4g")
            no_ties = "" if beyond is None else beyond["value"]
            differ = f"{count['value']} {count['unit'].removesuffix(' answers')}"
            rows.append(f"| {what} | {differ} | {largest} | {no_ties} |")
    return rows


def measured(figures: Figures) -> Iterator[tuple[str, int, str, str]]:
    """Yield place, concurrency, system and prefix of every point with a rate, in order."""
    found = [match for name in figures if (match := _POINT.fullmatch(name))]
    places = list(dict.fromkeys(match["place"] for match in found))
    keys = {(m["place"], int(m["at"]), m["system"]) for m in found}
    order = sorted(
        keys, key=lambda key: (places.index(key[0]), key[1], list(SYSTEMS).index(key[2]))
    )
    for place, at, system in order:
        yield place, at, system, f"serve.{place}.bs{at}.{system}"


def curves(figures: Figures) -> Curves:
    """Return concurrencies, decode rates and their spreads, by place and system."""
    found: Curves = {}
    for place, at, system, name in measured(figures):
        figure = figures.get(f"{name}.decode.tokens_per_s")
        if figure is not None:
            of_place = found.setdefault(place, {})
            of_place.setdefault(system, []).append((at, figure["value"], figure["spread"] or 0.0))
    return found


def _value(figure: dict[str, Any], form: str) -> str:
    value, spread = figure["value"], figure["spread"]
    return f"{value:{form}}" if spread is None else f"{value:{form}} ± {spread:{form}}"


def _short(note: str) -> str:
    """Return the note without the file and the model of the curve, for the head of a table."""
    return re.sub(r" of \S+ \([^)]*\)", "", note)
