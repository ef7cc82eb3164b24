"""Table of six serving results for the README: results for KVSpec, and results against it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving.points import label
from serving.records import Record, latest, read

POINTS = Path(__file__).resolve().parents[1] / "results" / "serving_h200.points.jsonl"
HEADER = (
    "| model, context | target | requests | tokens/s | plain bf16 | fp8 KV | against bf16 "
    "| p99 ITL (ms): KVSpec, bf16 | commit |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One point, and the number of requests at once of the points to compare it with. plain: plain
    SGLang. fp8: plain SGLang with an fp8 KV cache."""

    model: str
    context_len: int
    system: str
    concurrency: int
    plain: int
    fp8: int | None = None


ROWS = (
    Row("8b", 32768, "exact", 16, plain=16, fp8=16),
    Row("8b", 32768, "int8", 16, plain=16, fp8=16),
    Row("8b", 32768, "int8", 45, plain=26, fp8=52),
    Row("32b", 32768, "int8", 13, plain=7, fp8=15),
    Row("32b", 32768, "exact", 5, plain=7, fp8=15),
    Row("8b", 32768, "exact", 1, plain=1, fp8=1),
)


def summary(path: Path = POINTS) -> str:
    """Return the table. Raises KeyError for a point that was not measured."""
    by_key = {record.key: record for record in latest(read(path))}
    return "\n".join([HEADER, *(_line(row, by_key) for row in ROWS)])


def _line(row: Row, by_key: dict[tuple[str, int, int, str], Record]) -> str:
    place = (row.model, row.context_len)
    ours = by_key[(*place, row.concurrency, row.system)]
    plain = by_key[(*place, row.plain, "bf16")]
    fp8 = "" if row.fp8 is None else _rate(by_key[(*place, row.fp8, "fp8")], row)
    ratio = _tokens_per_s(ours) / _tokens_per_s(plain)
    cells = (
        label(*place).replace(".", ", "),
        f"`{row.system}`",
        row.concurrency,
        _rate(ours, row),
        _rate(plain, row),
        fp8,
        f"{ratio:.2f} x",
        f"{_gap(ours)}, {_gap(plain)}",
        ours.commit[:7],
    )
    return f"| {' | '.join(map(str, cells))} |"


def _rate(record: Record, row: Row) -> str:
    """Return tokens a second, with the number of requests if it differs from the row's."""
    rate = f"{_tokens_per_s(record):,.0f}"
    return rate if record.concurrency == row.concurrency else f"{rate} ({record.concurrency})"


def _tokens_per_s(record: Record) -> float:
    assert record.decode_rate is not None, f"{record.key} has no decode rate"
    return record.decode_rate.tokens_per_s


def _gap(record: Record) -> str:
    return "" if record.decode is None else f"{record.decode.itl_p99_ms:.0f}"
