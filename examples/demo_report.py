"""Report at the end of the demo: equality of texts, speed and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo_requests import Stage
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_SHOWN_CHARACTERS = 600
_UNKNOWN = "-"


@dataclass(frozen=True)
class ServerRun:
    """One server's answers. report: the kvspec section of /server_info, empty for plain SGLang."""

    label: str
    start_s: float
    stages: tuple[Stage, ...]
    report: dict[str, Any]

    @property
    def outputs(self) -> dict[str, str]:
        return {name: text for stage in self.stages for name, text in stage.outputs.items()}


def differences(kvspec: ServerRun, plain: ServerRun) -> dict[str, int | None]:
    """Return, for each output, None if both texts are equal, else the first differing position."""
    assert kvspec.outputs.keys() == plain.outputs.keys()
    return {
        name: _first_difference(text, plain.outputs[name]) for name, text in kvspec.outputs.items()
    }


def _first_difference(one: str, other: str) -> int | None:
    if one == other:
        return None
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def show(console: Console, model: str, kvspec: ServerRun, plain: ServerRun) -> None:
    """Print a piece of the text, the comparison of every output, and the figures."""
    name, output = list(kvspec.outputs.items())[-1]
    # Source code has many brackets, which rich would take for markup.
    sample = Text(output[:_SHOWN_CHARACTERS])
    console.print(Panel(sample, title=f"{name} (greedy, {model})", expand=False))
    console.print(_equality_table(kvspec, plain))
    console.print(_figure_table(kvspec, plain))
    console.print(
        "A small model on a CPU does not wait for KV bytes, so KVSpec cannot be faster here. This "
        "demo shows that the texts are equal, and how few bytes a draft reads."
    )


def _equality_table(kvspec: ServerRun, plain: ServerRun) -> Table:
    table = Table(title="Same text?")
    table.add_column("output")
    table.add_column("characters", justify="right")
    table.add_column("KVSpec = plain SGLang")
    for name, position in differences(kvspec, plain).items():
        equal = "[green]equal" if position is None else f"[red]differs from character {position}"
        table.add_row(name, str(len(kvspec.outputs[name])), equal)
    return table


def _figure_table(kvspec: ServerRun, plain: ServerRun) -> Table:
    table = Table(title="On this CPU, in float32")
    table.add_column("")
    for run in (kvspec, plain):
        table.add_column(run.label, justify="right")
    table.add_row("start (s)", f"{kvspec.start_s:.0f}", f"{plain.start_s:.0f}")
    for ours, theirs in zip(kvspec.stages, plain.stages, strict=True):
        if ours.first_token_s is not None and theirs.first_token_s is not None:
            table.add_row(
                f"{ours.name}: first token (s)",
                f"{ours.first_token_s:.2f}",
                f"{theirs.first_token_s:.2f}",
            )
        scope = "with prefill" if ours.first_token_s is None else "after the first"
        table.add_row(
            f"{ours.name}: tokens/s, {scope}",
            f"{ours.tokens_per_s:.1f}",
            f"{theirs.tokens_per_s:.1f}",
        )
    for row in (*_acceptance_rows(kvspec.report), *_memory_rows(kvspec.report)):
        table.add_row(*row)
    return table


def _acceptance_rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    counters = report.get("counters", {})
    drafted, accepted = counters.get("drafted"), counters.get("accepted")
    if not drafted or accepted is None:
        return [("drafted tokens accepted", _UNKNOWN, _UNKNOWN)]
    rows = [
        ("drafted tokens accepted", f"{accepted} of {drafted} ({accepted / drafted:.0%})", _UNKNOWN)
    ]
    if counters.get("verifications"):
        mean = accepted / counters["verifications"]
        rows.append(("mean accept length of a verification", f"{mean:.1f}", _UNKNOWN))
    return rows


def _memory_rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    pools = report.get("pools", {})
    plain = _bytes(pools.get("bytes_per_token_plain"))
    return [
        (
            "KV bytes per token that a draft reads",
            _bytes(pools.get("bytes_per_token_anchor")),
            plain,
        ),
        (
            "KV bytes per token that a verification adds",
            _bytes(pools.get("bytes_per_token_residual")),
            _UNKNOWN,
        ),
    ]


def _bytes(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}"
