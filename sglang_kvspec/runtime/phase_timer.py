"""Times of phases, on the device that runs them."""

from __future__ import annotations

import itertools
import time
from collections import deque

import torch


class PhaseTimer:
    """Timer that sets marks on the device's stream. Nothing waits for the marks before
    seconds()."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []

    def start(self) -> None:
        """Set the first mark, and forget the marks of an iteration that failed."""
        self._marks = []
        self.mark()

    def mark(self) -> None:
        if not self._on_device:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between every two marks since the last call. Waits until the device
        has reached the marks."""
        marks, self._marks = self._marks, []
        if not self._on_device:
            return [b - a for a, b in itertools.pairwise(marks)]  # type: ignore[operator]
        marks[-1].synchronize()  # type: ignore[union-attr]
        pairs = itertools.pairwise(marks)
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]  # type: ignore[union-attr,arg-type]


class TotalTimer:
    """Context manager that adds up the seconds of a phase that recurs. Nothing waits for the
    device: a phase counts once the device is through with it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds = device, 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._begin: float | torch.cuda.Event = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all phases that are over."""
        while self._pending:
            begin, end = self._pending[0]
            if not end.query():  # type: ignore[no-untyped-call]
                break
            self._pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        return self._seconds

    def __enter__(self) -> None:
        self._begin = self._now()

    def __exit__(self, *error: object) -> None:
        begin, end = self._begin, self._now()
        if isinstance(begin, float):
            assert isinstance(end, float)
            self._seconds += end - begin
        else:
            assert not isinstance(end, float)
            self._pending.append((begin, end))

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
