"""Counts of the calls of a round, from records of plugin/kvspec_round_trace.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

ENTRY = -1


@dataclass(frozen=True, slots=True)
class Function:
    """Function of the traced tree. file: path relative to the tree."""

    file: str
    name: str
    line: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `callee` by the innermost function of the tree on the stack, None for SGLang.

    through_library: frames of other files lie between the two functions. in_model: the call is
    below the model's forward.
    """

    caller: Function | None
    callee: Function
    through_library: bool
    in_model: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """Size of a round, or of a part of it.

    calls: calls from one function of the tree to another. direct_calls: calls with no frame of a
    library in between. cross_file_calls: calls between functions of different files. edges:
    distinct pairs of functions. file_changes: neighbours in the sequence of called functions that
    lie in different files. files: distinct files of called functions.
    """

    calls: float
    direct_calls: float
    cross_file_calls: float
    edges: float
    file_changes: float
    files: float


@dataclass(frozen=True, slots=True)
class Round:
    """Calls of one round in order; the first is SGLang's call of the worker."""

    calls: tuple[Call, ...]
    model_forwards: int

    def outside_model(self) -> Counts:
        return counts_of([call for call in self.calls if not call.in_model])

    def inside_model(self) -> Counts:
        return counts_of([call for call in self.calls if call.in_model])


def read_rounds(path: Path) -> list[Round]:
    """Read the rounds that the plug-in wrote to `path`."""
    record = json.loads(path.read_text(encoding="utf-8"))
    functions = [Function(*entry) for entry in record["functions"]]
    return [_round(entry, functions) for entry in record["rounds"]]


def _round(entry: dict[str, Any], functions: Sequence[Function]) -> Round:
    calls = tuple(
        Call(
            None if caller == ENTRY else functions[caller],
            functions[callee],
            bool(through_library),
            bool(in_model),
        )
        for caller, callee, through_library, in_model in entry["calls"]
    )
    return Round(calls, entry["model_forwards"])


def counts_of(calls: Sequence[Call]) -> Counts:
    """Count `calls`, given in order. A call by SGLang itself only begins the sequence of files."""
    ours = [call for call in calls if call.caller is not None]
    files = [call.callee.file for call in calls]
    return Counts(
        calls=len(ours),
        direct_calls=sum(not call.through_library for call in ours),
        cross_file_calls=sum(call.caller.file != call.callee.file for call in ours),
        edges=len({(call.caller, call.callee) for call in ours}),
        file_changes=sum(before != after for before, after in pairwise(files)),
        files=len(set(files)),
    )


def over_rounds(
    rounds: Sequence[Round],
    part: Callable[[Round], Counts],
    statistic: Callable[[Sequence[float]], float],
) -> Counts:
    """Return a statistic of each count. part: Round.outside_model, for example."""
    counts = [part(one) for one in rounds]
    fields = Counts.__dataclass_fields__
    return Counts(**{name: statistic([getattr(each, name) for each in counts]) for name in fields})


def half_quartile_range(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles of two or more values."""
    first, _, third = quantiles(values, method="inclusive")
    return (third - first) / 2


def median_round(rounds: Sequence[Round]) -> Round:
    """Return a round whose number of calls outside the model is the (lower) median."""
    ordered = sorted(rounds, key=lambda one: one.outside_model().calls)
    return ordered[(len(ordered) - 1) // 2]


def call_tree(one: Round) -> str:
    """Draw one line per call, indented below its caller: the file, the line and the name."""
    lines: list[str] = []
    open_calls: list[Function] = []
    for call in one.calls:
        while open_calls and open_calls[-1] != call.caller:
            open_calls.pop()
        mark = "[model] " if call.in_model else ""
        where = f"{call.callee.file}:{call.callee.line}"
        lines.append(f"{'  ' * len(open_calls)}{mark}{call.callee.name}  {where}")
        open_calls.append(call.callee)
    return "\n".join(lines) + "\n"
