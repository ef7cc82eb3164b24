"""One measured point as data, and the JSON lines that keep points of several runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Pass:
    """Result of sglang.bench_serving for one pass over the prompts: rates in tokens/s, times in ms.

    For the p50 and p99 of ITL, the time between two chunks is spread over the chunk's tokens.
    """

    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_mean_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tpot_mean_ms: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Tokens per second while every request decodes, and its 95% half width over the time.

    steady: False if requests never all decoded at once. The rate then covers the whole pass.
    """

    tokens_per_s: float
    spread: float | None
    steady: bool


@dataclass(frozen=True, slots=True)
class Record:
    """One point on one system. decode: pass with cached prompts. end_to_end: pass without.

    acceptance: "replayed", "real", or "" for plain SGLang. counters: increases of KVSpec's counters
    during the passes. timing: recent times of rounds that KVSpec measured, in ms. start_s: seconds
    from launch to healthy. first_start: nothing had been read or compiled yet. compiled: kernels
    that were compiled since the point before, or since the server was healthy for its first point;
    None if not recorded. versions: versions of installed packages, empty if not recorded.
    """

    model: str
    context_len: int
    concurrency: int
    system: str
    acceptance: str
    prompt_len: int
    output_len: int
    end_to_end: Pass | None = None
    decode: Pass | None = None
    decode_rate: DecodeRate | None = None
    counters: dict[str, Any] = field(default_factory=dict)
    draft_iter_ms: float | None = None
    timing: dict[str, float] = field(default_factory=dict)
    max_total_num_tokens: int | None = None
    hbm_gib: float | None = None
    start_s: float = 0.0
    first_start: bool = False
    compiled: list[str] | None = None
    server_arguments: list[str] = field(default_factory=list)
    machine: str = ""
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, int, int, str]:
        return (self.model, self.context_len, self.concurrency, self.system)

    @property
    def accepted_per_verification(self) -> float | None:
        verifications = self.counters.get("verifications")
        return self.counters["accepted"] / verifications if verifications else None

    @property
    def drafted_per_verification(self) -> float | None:
        verifications = self.counters.get("verifications")
        return self.counters["drafted"] / verifications if verifications else None


def append(path: Path, record: Record) -> None:
    """Add one line to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a file of these records, as append() does. Replaces an existing file."""
    lines = [json.dumps(asdict(record)) + "\n" for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def consecutive(records: Iterable[Record]) -> list[Record]:
    """Correct `first_start` in records of runs that followed each other on one machine. Each run
    marks its first server, but only the first server of all found nothing read or compiled."""
    known = list(records)
    first = min((record.date for record in known), default="")
    return [replace(record, first_start=record.date == first) for record in known]


def read(path: Path) -> list[Record]:
    """Read the records of a file written by append()."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_from_json(json.loads(line)) for line in lines if line.strip()]


def latest(records: Iterable[Record]) -> list[Record]:
    """Return one record per point and system. Of the measurements of one server it is that with the
    median decode rate, the lower one of two. A later server replaces an earlier one, pass by pass,
    so the two passes may come from two runs. Raises ValueError if machines differ."""
    servers: dict[tuple[str, int, int, str], list[list[Record]]] = {}
    machines = set()
    for record in records:
        machines.add(record.machine)
        own = servers.setdefault(record.key, [])
        if own and _server(own[-1][-1]) == _server(record):
            own[-1].append(record)
        else:
            own.append([record])
    if len(machines) > 1:
        raise ValueError(f"points of different machines cannot be compared: {sorted(machines)}")
    return [reduce(_overlay, map(_median, own)) for own in servers.values()]


def _server(record: Record) -> tuple[str, float, bool, bool]:
    """Return what measurements of one server and of the same passes have in common."""
    has_passes = (record.end_to_end is not None, record.decode is not None)
    return (record.commit, record.start_s, *has_passes)


def _median(repeats: Sequence[Record]) -> Record:
    def rate_of(record: Record) -> float:
        return 0.0 if record.decode_rate is None else record.decode_rate.tokens_per_s

    return sorted(repeats, key=rate_of)[(len(repeats) - 1) // 2]


def _overlay(earlier: Record, later: Record) -> Record:
    """Return `later`, with the passes that it did not run from `earlier`."""
    kept: dict[str, Any] = {}
    if later.end_to_end is None:
        kept["end_to_end"] = earlier.end_to_end
    if later.decode is None:
        kept |= {"decode": earlier.decode, "decode_rate": earlier.decode_rate}
    if later.draft_iter_ms is None:
        kept["draft_iter_ms"] = earlier.draft_iter_ms
    return replace(later, **kept)


def _from_json(row: dict[str, Any]) -> Record:
    for name, kind in (("end_to_end", Pass), ("decode", Pass), ("decode_rate", DecodeRate)):
        if row.get(name) is not None:
            row[name] = kind(**row[name])
    return Record(**row)
