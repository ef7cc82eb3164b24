"""Timing of GPU work in CUDA graphs, which excludes launches and Python."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from acceptance.report import Figure

from kvspec_kernels.ops.capture import captured_graph

REPLAYS = 21
LEAST_CALLS = 6


@dataclass(frozen=True, slots=True)
class Timing:
    """Median over replays in seconds, and half the distance between the outer deciles."""

    median_s: float
    spread_s: float

    @property
    def microseconds(self) -> float:
        return self.median_s * 1e6


def measure(calls: list[Callable[[], object]], replays: int = REPLAYS) -> Timing:
    """Return the time of one call. Each call should use inputs of its own.

    One graph captures the calls in turn, at least LEAST_CALLS in all, so that the launch of the
    graph does not count.
    """
    return measure_in_turn({"": calls}, replays)[""]


def measure_in_turn(
    candidates: dict[str, list[Callable[[], object]]], replays: int = REPLAYS
) -> dict[str, Timing]:
    """Return the times of candidates, each as in measure(). Their replays alternate, so that all
    see the same clock of the device."""
    graphs = {}
    for name, calls in candidates.items():
        calls = calls * -(-LEAST_CALLS // len(calls))
        graphs[name] = (_captured(calls), len(calls))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(replays):
        for name, (graph, count) in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) / 1e3 / count)
    return {name: _timing(each) for name, each in seconds.items()}


def _captured(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Return a graph of calls that has run once."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    with captured_graph() as graph:
        for call in calls:
            call()
    graph.replay()
    return graph


def _timing(seconds: list[float]) -> Timing:
    deciles = statistics.quantiles(seconds, n=10)
    return Timing(statistics.median(seconds), (deciles[8] - deciles[0]) / 2)


def time_figure(name: str, timing: Timing) -> Figure:
    """Return the figure NAME.us of a timing."""
    return Figure(f"{name}.us", timing.microseconds, "microseconds", timing.spread_s * 1e6)


def copy_bandwidth(nbytes: int = 2**31) -> float:
    """Return bytes per second, read plus written, of the faster of two ways to copy in PyTorch."""
    source = torch.ones(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)

    def by_copy() -> None:
        target.copy_(source)

    def by_kernel() -> None:
        torch.add(source, 0, out=target)

    best = min(measure([call] * 3).median_s for call in (by_copy, by_kernel))
    return 2 * nbytes / best
