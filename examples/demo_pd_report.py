"""Report of the disaggregation demo: a table, and one request's timeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from demo_requests import Answer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from kvspec_testkit.servers.transfer_report import TransferReport

_UNKNOWN = "-"
# Rows of the picture, from the top.
_ROWS = ("prefill", "anchors", "residuals", "drafts", "verification", "tokens")
_COLOURS = dict(zip(_ROWS, ("0.55", "C0", "C1", "C2", "C3", "0.2"), strict=True))


def show(
    console: Console, answers: Mapping[str, Answer], reports: Mapping[str, TransferReport]
) -> None:
    """Print the table. answers, reports: by name of the prompt."""
    table = Table(title="Disaggregated prefill and decode, in seconds since the prefill ended")
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right")
    columns = [_column(answers[name], reports[name]) for name in reports]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    console.print(table)


def _column(answer: Answer, report: TransferReport) -> dict[str, str]:
    transfer = report.transfer
    seconds = transfer.seconds
    return {
        "prompt tokens": f"{answer.num_prompt_tokens:,}",
        "all anchors arrived": _seconds(seconds.anchors),
        "all residuals arrived": _seconds(seconds.residuals),
        "first verification": _seconds(seconds.first_verification),
        "drafts before the first verification": (
            f"{len(transfer.drafts_s)}, kept {transfer.accepted_first}"
        ),
        "drafts before all residuals arrived": (
            f"{transfer.drafts_before_residuals}, kept {transfer.kept_before_residuals}"
        ),
        "anchors (MB)": _megabytes(transfer.bytes.anchors),
        "residuals (MB)": _megabytes(transfer.bytes.residuals),
    }


def draw_timeline(path: Path, report: TransferReport, answer: Answer) -> None:
    """Draw a PNG of one request, from its start to its last token, or to the last token that has a
    time."""
    transfer = report.transfer
    seconds = transfer.seconds
    figure = Figure(figsize=(9.5, 3.8), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    sent = answer.sent_at - transfer.prefill_ended_at
    spans = {
        "prefill": (sent, 0.0),
        "anchors": (0.0, seconds.anchors),
        "residuals": (seconds.anchors, seconds.residuals),
    }
    for row, (begin, end) in spans.items():
        if begin is not None and end is not None:
            axes.barh(row, end - begin, left=begin, height=0.55, color=_COLOURS[row])
    kept = transfer.drafts_s[: transfer.accepted_first]
    thrown_away = transfer.drafts_s[transfer.accepted_first :]
    ticks = (
        ("drafts", kept, _COLOURS["drafts"]),
        ("drafts", thrown_away, "0.8"),
        ("verification", [at for at in [seconds.first_verification] if at is not None], "C3"),
        ("tokens", report.token_s, _COLOURS["tokens"]),
    )
    for row, times, colour in ticks:
        level = _ROWS.index(row)
        axes.vlines(times, level - 0.28, level + 0.28, color=colour, linewidth=1.2)
    axes.set_yticks(range(len(_ROWS)), _labels(report))
    axes.invert_yaxis()
    axes.axvline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.set_xlabel("seconds since the prefill ended")
    axes.set_title(f"One request of {answer.num_prompt_tokens:,} tokens, disaggregated")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _labels(report: TransferReport) -> list[str]:
    transfer = report.transfer
    return [
        "prefill",
        f"anchors, {_megabytes(transfer.bytes.anchors)} MB",
        f"residuals, {_megabytes(transfer.bytes.residuals)} MB",
        f"drafts, {transfer.accepted_first} of {len(transfer.drafts_s)} kept",
        "first verification",
        "output tokens",
    ]


def _seconds(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.2f}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"
