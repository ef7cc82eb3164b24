"""Times of the phases of an iteration, on the device that runs them."""

from __future__ import annotations

import itertools
import time

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
