"""Table of six serving results for the README: results for KVSpec, and results against it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving.points import label
from serving.records import Record, latest, read

POINTS = Path(__file__).resolve().parents[1] / "results" / "serving_h200.points.jsonl"
HEADER = (
    "| model, context | target | requests | tokens/s | plain bf16 | fp8 KV | against bf16 "
    "| p99 ITL (ms): KVSpec, bf16 |\n|---|---|---|---|---|---|---|---|"
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
    fp8: int

    @property
    def keys(self) -> tuple[tuple[str, int, int, str], ...]:
        """Return Record.key of this point, of plain SGLang's and of the fp8 KV cache's."""
        return tuple(
            (self.model, self.context_len, concurrency, system)
            for concurrency, system in (
                (self.concurrency, self.system),
                (self.plain, "bf16"),
                (self.fp8, "fp8"),
            )
        )


ROWS = (
    Row("8b", 32768, "exact", 16, plain=16, fp8=16),
    Row("8b", 32768, "int8", 16, plain=16, fp8=16),
    Row("8b", 32768, "int8", 45, plain=26, fp8=52),
    Row("32b", 32768, "int8", 13, plain=7, fp8=15),
    Row("32b", 32768, "exact", 5, plain=7, fp8=15),
    Row("8b", 32768, "exact", 1, plain=1, fp8=1),
)


def summary(path: Path = POINTS) -> str:
    """Return the table, and a sentence with the commit. Raises KeyError for a point that was not
    measured, and ValueError for points of several commits."""
    by_key = {record.key: record for record in latest(read(path))}
    points = [[by_key[key] for key in row.keys] for row in ROWS]
    commits = {point.commit[:7] for row in points for point in row}
    if len(commits) > 1:
        raise ValueError(f"the points of the summary must have one commit, got {sorted(commits)}")
    lines = [_line(row, *each) for row, each in zip(ROWS, points, strict=True)]
    return "\n".join([HEADER, *lines, "", f"All points: one card, commit {commits.pop()}."])


def _line(row: Row, ours: Record, plain: Record, fp8: Record) -> str:
    ratio = _tokens_per_s(ours) / _tokens_per_s(plain)
    cells = (
        label(row.model, row.context_len).replace(".", ", "),
        f"`{row.system}`",
        row.concurrency,
        _rate(ours, row),
        _rate(plain, row),
        _rate(fp8, row),
        f"{ratio:.2f} x",
        f"{_gap(ours)}, {_gap(plain)}",
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
