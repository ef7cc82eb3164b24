"""Figures of measured points: rates, and ratios to plain bf16, with their spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import median

from acceptance.report import Figure

from serving.points import label
from serving.records import Record
from serving.systems import BASELINE, READS_ALL, SYSTEMS

DRAFTING = tuple(name for name, system in SYSTEMS.items() if system.target is not None)
_COMPILED = "kernels compiled while the server served"
_UNITS = {"tokens_per_s": "tokens/s", "_ms": "ms", "_s": "s"}

Rate = tuple[float, float | None]  # tokens/s and the half width of its 95% interval
RateOf = Callable[[Record], Rate | None]


def decode_rate_of(record: Record) -> Rate | None:
    rate = record.decode_rate
    return None if rate is None else (rate.tokens_per_s, rate.spread)


def end_to_end_rate_of(record: Record) -> Rate | None:
    found = record.end_to_end
    return None if found is None else (found.output_tokens_per_s, None)


# Kinds of rates, by the suffix behind `vs_bf16` in the name of a figure.
RATES: dict[str, tuple[str, RateOf]] = {
    "": ("decode tokens/s", decode_rate_of),
    "_end_to_end": ("output tokens/s, prefill included", end_to_end_rate_of),
}


def all_figures(records: Sequence[Record]) -> list[Figure]:
    """Return the ratios first, then the figures that they come from. records: one per point and
    system."""
    ordered = sorted(records, key=_place)
    compared: list[Figure] = []
    for (model, context_len), group in groupby(ordered, key=_place):
        here = list(group)
        compared += point_ratios(here)
        compared += saturation_ratios(label(model, context_len), here)
    own = [figure for record in ordered for figure in record_figures(record)]
    return [*compared, *start_figures(ordered), *own]


def point_ratios(records: Sequence[Record]) -> list[Figure]:
    """Compare every system with plain bf16 at the same concurrency, and drafts that read a share of
    the pages with drafts that read all. Return the ratios, and the time of a draft step."""
    figures = []
    for concurrency in sorted({record.concurrency for record in records}):
        here = [record for record in records if record.concurrency == concurrency]
        name = f"serve.{label(here[0].model, here[0].context_len, concurrency)}"
        base = next((record for record in here if record.system == BASELINE), None)
        figures += _draft_iteration(name, here, base)
        figures += _ratios_to_all_pages(name, here)
        for record in here:
            if base is None or record is base:
                continue
            for suffix, (what, rate_of) in RATES.items():
                rate, against = rate_of(record), rate_of(base)
                if rate and against:
                    unit = f"x {BASELINE}, {what}{_mark(record)}"
                    full = f"{name}.{record.system}.vs_{BASELINE}{suffix}"
                    figures.append(_ratio(full, rate, against, unit))
    return figures


def _ratios_to_all_pages(name: str, records: Sequence[Record]) -> list[Figure]:
    rates = {record.system: decode_rate_of(record) for record in records}
    unit = "x the same target with --kvspec-draft-view=all, decode tokens/s"
    return [
        _ratio(f"{name}.{system}.vs_all", rate, against, unit)
        for system, rate in rates.items()
        if rate and (against := rates.get(system + READS_ALL))
    ]


def _draft_iteration(name: str, records: Sequence[Record], base: Record | None) -> list[Figure]:
    """Return the draft step of the slower target, compared with a step of plain decoding."""
    times = [record.draft_iter_ms for record in records if record.draft_iter_ms is not None]
    if not times:
        return []
    rate = None if base is None else decode_rate_of(base)
    step_ms = None if rate is None else 1000 * records[0].concurrency / rate[0]
    return [Figure(f"{name}.draft_iter_ms", max(times), "ms", None, step_ms)]


# Requests that fit, over requests that were sent, above which a system may reach a better rate.
MUCH_ROOM = 1.25


def saturation_ratios(name: str, records: Sequence[Record]) -> list[Figure]:
    """Compare each system's best rate over its concurrencies with bf16's best. Leave out a system
    with one concurrency. Leave out a system with fewer requests at once than bf16's best and room
    for many more: its best may not have been measured."""
    figures, best_of_all = [], []
    for suffix, (what, rate_of) in RATES.items():
        base = _best_of(records, BASELINE, rate_of)
        for system in dict.fromkeys(r.system for r in records if r.system != BASELINE):
            found = _best_of(records, system, rate_of)
            if base is None or found is None or _may_take_more(records, found, base):
                continue
            unit = (
                f"x {BASELINE}, {what}{_mark(found)}, at {found.concurrency} against "
                f"{base.concurrency} requests"
            )
            full = f"serve.{name}.saturation.{system}.vs_{BASELINE}{suffix}"
            ratio = _ratio(full, _known(rate_of(found)), _known(rate_of(base)), unit)
            figures.append(ratio)
            if not suffix and system in DRAFTING:
                best_of_all.append((ratio, system))
    if best_of_all:
        ratio, system = max(best_of_all, key=lambda pair: pair[0].value)
        full, unit = f"serve.{name}.saturation.vs_{BASELINE}", f"{ratio.unit}, {system}"
        figures.insert(0, Figure(full, ratio.value, unit, ratio.spread, ratio.baseline))
    return figures


def _best_of(records: Iterable[Record], system: str, rate_of: RateOf) -> Record | None:
    """Return the best of a system's points, or None if it has fewer than two."""
    own = [record for record in records if record.system == system and rate_of(record)]
    return best(own, rate_of) if len(own) > 1 else None


def _may_take_more(records: Iterable[Record], found: Record, base: Record) -> bool:
    """Return True if all points of a system have fewer requests than `base` of another system,
    though the system has room for more."""
    most = max(record.concurrency for record in records if record.system == found.system)
    fitting = (found.max_total_num_tokens or 0) / (found.prompt_len + found.output_len)
    return most < base.concurrency and fitting > MUCH_ROOM * most


def best(records: Iterable[Record], rate_of: RateOf) -> Record | None:
    """Return the record with the highest rate, or None if no record has a rate."""
    rated = [(rate[0], record) for record in records if (rate := rate_of(record))]
    return max(rated, key=lambda pair: pair[0])[1] if rated else None


def start_figures(records: Sequence[Record]) -> list[Figure]:
    """Return how much longer a server with --kvspec takes to start, for the model with the largest
    difference. The first server of a run does not count: it reads from a cold disk and compiles for
    all. Return nothing if a side has no other server."""
    by_model: dict[str, list[Record]] = {}
    for record in records:
        if record.start_s and not record.first_start:
            by_model.setdefault(record.model, []).append(record)
    figures = [figure for here in by_model.values() for figure in _start_figure(here)]
    return [max(figures, key=lambda figure: figure.value)] if figures else []


def _start_figure(records: Sequence[Record]) -> list[Figure]:
    plain, drafting = (
        {(r.date, r.start_s) for r in records if (r.system in DRAFTING) == side}
        for side in (False, True)
    )
    if not plain or not drafting:
        return []
    base, ours = (median(_known_s(s) for _, s in starts) for starts in (plain, drafting))
    every = [_known_s(s) for _, s in plain | drafting]
    unit = f"s, median of {len(drafting)} against {len(plain)} of plain SGLang"
    spread = round(max(every) - min(every), 1)
    return [Figure("start.extra_seconds", round(ours - base, 1), unit, spread, base)]


def _known_s(seconds: float | None) -> float:
    assert seconds is not None, "a record of start_figures() has no start time"
    return seconds


def record_figures(record: Record) -> list[Figure]:
    """Return the figures of one point on one system, by pass."""
    place = label(record.model, record.context_len, record.concurrency)
    name = f"serve.{place}.{record.system}"
    figures = []
    if record.decode_rate is not None:
        rate = record.decode_rate
        unit = "tokens/s" if rate.steady else "tokens/s, requests waited for each other"
        figures.append(Figure(f"{name}.decode.tokens_per_s", rate.tokens_per_s, unit, rate.spread))
    for kind, found in (("decode_pass", record.decode), ("end_to_end", record.end_to_end)):
        for key, value in asdict(found).items() if found else ():
            unit = next(unit for end, unit in _UNITS.items() if key.endswith(end))
            figures.append(Figure(f"{name}.{kind}.{key}", value, unit))
    for key, value, unit in (
        ("accepted", record.accepted_per_verification, "drafts a verification"),
        ("drafted", record.drafted_per_verification, "drafts a verification"),
        ("draft_iter_ms", record.draft_iter_ms, "ms"),
        ("hbm_gib", record.hbm_gib, "GiB"),
        ("max_total_num_tokens", record.max_total_num_tokens, "tokens"),
        ("start_seconds", record.start_s, "s"),
        ("compiled", None if record.compiled is None else len(record.compiled), _COMPILED),
    ):
        if value is not None:
            figures.append(Figure(f"{name}.{key}", value, unit))
    return figures


def _ratio(name: str, rate: Rate, against: Rate, unit: str) -> Figure:
    """Return the ratio of two independent rates. Squares of their relative half widths add up. The
    spread is unknown if one half width is."""
    value = rate[0] / against[0]
    spread = None
    if rate[1] is not None and against[1] is not None:
        shares = (rate[1] / rate[0], against[1] / against[0])
        spread = value * sum(share**2 for share in shares) ** 0.5
    return Figure(name, value, unit, spread, against[0])


def _known(rate: Rate | None) -> Rate:
    assert rate is not None, "a compared record has no rate"
    return rate


def _mark(record: Record) -> str:
    return f", acceptance {record.acceptance}" if record.acceptance else ""


def _place(record: Record) -> tuple[str, int]:
    return (record.model, record.context_len)
