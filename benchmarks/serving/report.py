"""Report of a run: the JSON of its figures, and a table on the console."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from acceptance.report import write_json
from rich.table import Table

from serving.figures import RATES, all_figures
from serving.identity import Identity
from serving.points import label
from serving.records import Record
from serving.systems import BASELINE, SYSTEMS


def acceptance_note(records: Sequence[Record], source: str) -> str:
    """Return the first line of every report: whether acceptance is real or replayed."""
    return note_on({record.acceptance for record in records}, source)


def note_on(found: Collection[str], source: str) -> str:
    """Return the note on acceptance. found: acceptance on the servers: "replayed", "real", or ""
    without drafts."""
    if "replayed" not in found:
        return "acceptance is real" if "real" in found else "nothing was drafted"
    also = ", but real where a model has weights of its own" if "real" in found else ""
    return f"acceptance is REPLAYED from {source}{also}"


def write_report(
    path: Path,
    records: Sequence[Record],
    source: str,
    missing: Sequence[str],
    identity: Identity | None = None,
) -> None:
    """Write the JSON to `path`. identity: results to copy into it."""
    settings: dict[str, Any] = {
        "acceptance": acceptance_note(records, source),
        "rates": {f"vs_{BASELINE}{suffix}": what for suffix, (what, _) in RATES.items()},
        "output_len": sorted({record.output_len for record in records}),
        "prompt_len": {
            label(record.model, record.context_len): record.prompt_len for record in records
        },
        "spread": "95% half width over eight parts of the time in which all requests decode",
        "server_arguments": {
            f"{record.model}.{record.system}": record.server_arguments for record in records
        },
        "measured_at": sorted({f"{record.commit} {record.date}" for record in records}),
        "starts": [_start(record) for record in _one_a_start(records)],
        "compiled_while_serving": {
            f"{label(*_at(record))}.{record.system}": record.compiled
            for record in records
            if record.compiled
        },
        "missing": list(missing),
    }
    figures = all_figures(records)
    if identity is not None:
        settings["identity"] = identity.settings
        figures += identity.figures
    write_json(
        path,
        "serving",
        torch.device("cpu"),
        settings,
        figures,
        machine=records[0].machine,
        commit=records[-1].commit,
        measured_with=dict(pair for record in records for pair in record.versions.items()),
    )


def _one_a_start(records: Sequence[Record]) -> list[Record]:
    """Return one point of every server that was started, in order."""
    starts = {(record.date, record.model, record.system): record for record in records}
    return [starts[key] for key in sorted(starts)]


def _start(record: Record) -> str:
    first = (
        ", first start: no file had been read and no kernel compiled yet"
        if record.first_start
        else ""
    )
    return f"{record.date} {record.model} {record.system}: {record.start_s:.1f} s{first}"


def console_table(
    records: Sequence[Record], source: str, missing: Sequence[str]
) -> Iterator[str | Table]:
    """Yield what to print, the note on acceptance first."""
    yield acceptance_note(records, source)
    for (model, context_len), group in groupby(sorted(records, key=_order), key=_place):
        here = list(group)
        title = f"{label(model, context_len)} ({acceptance_note(here, source)})"
        table = Table(title=title, title_justify="left")
        for heading in (
            "requests",
            "system",
            "decode tokens/s",
            "x bf16",
            "tokens/s with prefill",
            "x bf16",
            "TTFT mean/p99 ms",
            "ITL p50/p99 ms",
            "TPOT ms",
            "kept/drafted",
            "HBM GiB",
            "tokens fit",
        ):
            table.add_column(heading, justify="left" if heading == "system" else "right")
        for record in here:
            base = next((r for r in here if _at(r) == _at(record) and r.system == BASELINE), None)
            table.add_row(*_cells(record, base))
        yield table
    for text in missing:
        yield f"not measured: {text}"


def _cells(record: Record, base: Record | None) -> list[str]:
    cells = [str(record.concurrency), record.system]
    for _, rate_of in RATES.values():
        rate, against = rate_of(record), rate_of(base) if base else None
        spread = f" ± {rate[1]:.1f}" if rate and rate[1] is not None else ""
        cells.append(f"{rate[0]:.1f}{spread}" if rate else "-")
        cells.append(f"{rate[0] / against[0]:.2f}" if rate and against else "-")
    # Prefer times of the pass with prefill: in the other pass, prompts are cached.
    found = record.end_to_end or record.decode
    cells += (
        [
            f"{found.ttft_mean_ms:.0f}/{found.ttft_p99_ms:.0f}",
            f"{found.itl_p50_ms:.2f}/{found.itl_p99_ms:.2f}",
            f"{found.tpot_mean_ms:.2f}",
        ]
        if found
        else ["-"] * 3
    )
    accepted, drafted = record.accepted_per_verification, record.drafted_per_verification
    cells += [
        "-" if accepted is None or drafted is None else f"{accepted:.2f}/{drafted:.2f}",
        "-" if record.hbm_gib is None else f"{record.hbm_gib:.1f}",
        "-" if record.max_total_num_tokens is None else f"{record.max_total_num_tokens:,}",
    ]
    return cells


def _order(record: Record) -> tuple[str, int, int, int]:
    return (*_at(record), list(SYSTEMS).index(record.system))


def _at(record: Record) -> tuple[str, int, int]:
    return (record.model, record.context_len, record.concurrency)


def _place(record: Record) -> tuple[str, int]:
    return (record.model, record.context_len)
