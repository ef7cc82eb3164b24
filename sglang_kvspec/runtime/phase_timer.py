"""Times of phases, on the device that runs them."""

from __future__ import annotations

import itertools
import time
from collections import deque

import torch

# A moment: on a GPU an event of the current stream.
Mark = float | torch.cuda.Event


class PhaseTimer:
    """Timer that sets marks on the device's stream. Nothing waits for the marks before
    seconds()."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Mark] = []

    def start(self) -> None:
        """Set the first mark, and forget the marks of an iteration that failed."""
        self._marks = []
        self.mark()

    def mark(self) -> None:
        self._marks.append(_mark_now(self._device))

    def seconds(self) -> list[float]:
        """Return the seconds between every two marks since the last call. Waits until the device
        has reached the marks."""
        marks, self._marks = self._marks, []
        if self._device.type == "cuda":
            marks[-1].synchronize()  # type: ignore[union-attr]
        return [_seconds_between(begin, end) for begin, end in itertools.pairwise(marks)]


class TotalTimer:
    """Context manager that adds up the seconds of a phase that recurs. Nothing waits for the
    device: a phase counts once the device is through with it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds = device, 0.0
        self._pending: deque[tuple[Mark, Mark]] = deque()
        self._begin: Mark = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all phases that are over."""
        self.settle()
        return self._seconds

    def settle(self) -> None:
        """Add up the phases that are over. Until then each of them keeps two events of a GPU."""
        while self._pending and _is_past(self._pending[0][1]):
            self._seconds += _seconds_between(*self._pending.popleft())

    def __enter__(self) -> None:
        self._begin = _mark_now(self._device)

    def __exit__(self, *error: object) -> None:
        self._pending.append((self._begin, _mark_now(self._device)))


def _mark_now(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _is_past(mark: Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())  # type: ignore[no-untyped-call]


def _seconds_between(begin: Mark, end: Mark) -> float:
    """Return the seconds from a mark to a later one, both past."""
    if isinstance(begin, float):
        return end - begin  # type: ignore[operator]
    return float(begin.elapsed_time(end)) / 1e3  # type: ignore[arg-type]
