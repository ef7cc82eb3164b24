"""GPU events of a torch profiler's trace: what ran, when, and in which graph replay."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.kernel_names import COPIES, category_of

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


class TraceError(RuntimeError):
    """Error for a trace that lacks what is needed. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """Kernel, copy or fill. Times are in microseconds of the trace's clock.

    replay: number of the CUDA-graph replay that contains the event, None if it was launched alone.
    """

    begin_us: float
    end_us: float
    name: str
    category: str
    replay: int | None

    @property
    def us(self) -> float:
        return self.end_us - self.begin_us


@dataclass(frozen=True, slots=True)
class Gap:
    """Time in which nothing runs on the GPU, in microseconds, and the kernels around it."""

    begin_us: float
    end_us: float
    after: str
    before: str

    @property
    def us(self) -> float:
        return self.end_us - self.begin_us


def read_trace(path: Path) -> list[GpuEvent]:
    """Return the GPU events of a .trace.json.gz, ordered by begin.

    Raises TraceError for a file that is truncated or no trace, and for a trace without a GPU.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path.name} is not a readable trace: {error}") from error
    return gpu_events(events, path.name)


def gpu_events(events: Iterable[dict[str, Any]], where: str = "the trace") -> list[GpuEvent]:
    """Return the GPU events of a Chrome trace, ordered by begin. where: name of the trace in the
    TraceError for a trace without a GPU."""
    graphs, found, num_cpu = set(), [], 0
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X":
            continue
        num_cpu += category == "cpu_op"
        if category in _LAUNCHES and event["name"].startswith(_GRAPH_LAUNCHES):
            graphs.add(event["args"]["correlation"])
        elif category in _ON_GPU:
            found.append(event)
    if not found:
        raise TraceError(
            f"{where} has no GPU activity: no kernel, only {num_cpu} operations on the CPU"
        )
    ordered = sorted(found, key=lambda event: float(event["ts"]))
    return [_gpu_event(event, graphs) for event in ordered]


def _gpu_event(event: dict[str, Any], graphs: set[int]) -> GpuEvent:
    begin, correlation = float(event["ts"]), event["args"].get("correlation")
    is_kernel = event["cat"] == "kernel"
    return GpuEvent(
        begin_us=begin,
        end_us=begin + float(event["dur"]),
        name=event["name"],
        category=category_of(event["name"]) if is_kernel else COPIES,
        replay=correlation if correlation in graphs else None,
    )


def busy_us(events: Iterable[GpuEvent], begin_us: float, end_us: float) -> float:
    """Return the microseconds between begin and end in which any of `events` runs. events: ordered
    by begin."""
    busy, reached = 0.0, begin_us
    for event in events:
        begin, end = max(event.begin_us, reached), min(event.end_us, end_us)
        if end > begin:
            busy += end - begin
            reached = end
    return busy


def gaps(events: Sequence[GpuEvent], begin_us: float, end_us: float, following: str) -> list[Gap]:
    """Return the gaps between begin and end in which none of `events` runs. events: ordered by
    begin. following: name of what comes at the end."""
    found, reached, last = [], begin_us, "the start"
    for event in events:
        if event.begin_us >= end_us:
            break
        if event.begin_us > reached:
            found.append(Gap(reached, event.begin_us, last, event.name))
        if event.end_us >= reached:
            reached, last = event.end_us, event.name
    if reached < end_us:
        found.append(Gap(reached, end_us, last, following))
    return found
