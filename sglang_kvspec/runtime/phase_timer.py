"""How long phases of an iteration take on the device they run on."""

from __future__ import annotations

import itertools
import time

import torch


class PhaseTimer:
    """Marks on the device's stream; nothing waits for them until seconds() is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []

    def start(self) -> None:
        """The first mark; forgets those of an iteration that failed."""
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
        """Between every two marks since the last call. Waits for the device to reach them."""
        marks, self._marks = self._marks, []
        if not self._on_device:
            return [b - a for a, b in itertools.pairwise(marks)]  # type: ignore[operator]
        marks[-1].synchronize()  # type: ignore[union-attr]
        pairs = itertools.pairwise(marks)
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]  # type: ignore[union-attr,arg-type]
