"""Model of a GPU's streams: queues whose progress a test controls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from sglang_kvspec.kv.copy_streams import Copy, CopyStreams, Event, copies_of_rows

Work = Callable[[], bool]


class ModelEvent:
    def __init__(self, stream: ModelStream) -> None:
        self.stream = stream
        self.is_over = False
        self.at = float("nan")

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        """Run the event's stream until the event is over. Other streams run only while that stream
        waits."""
        while not self.is_over:
            if not self.stream.step():
                progress = [stream.step() for stream in self.stream.beside]
                assert any(progress), "the event never ends: no stream can run"


class ModelStream:
    """Queue of work that only step() does, one piece in a second of the stream's clock.

    deaf_to: streams whose events this stream ignores, as a fault.
    """

    def __init__(self) -> None:
        self._work: deque[Work] = deque()
        self._now = 0.0
        self.deaf_to: tuple[ModelStream, ...] = ()
        # All streams of the device, which run while the CPU waits for this stream.
        self.beside: tuple[ModelStream, ...] = (self,)

    def do(self, action: Callable[[], object]) -> None:
        def work() -> bool:
            action()
            return True

        self._work.append(work)

    def copy(self, copies: Sequence[Copy]) -> None:
        for target, source in copies:
            self.do(partial(target.copy_, source))

    def copy_pages(
        self,
        target: torch.Tensor,
        target_rows: Sequence[int],
        source: torch.Tensor,
        source_rows: Sequence[int],
    ) -> None:
        self.copy(copies_of_rows(target, target_rows, source, source_rows))

    def copy_rows(
        self,
        target: torch.Tensor,
        target_rows: torch.Tensor,
        source: torch.Tensor,
        source_rows: torch.Tensor,
    ) -> None:
        for to, origin in zip(target_rows.tolist(), source_rows.tolist(), strict=True):
            self.do(partial(target[to].copy_, source[origin]))

    def current(self) -> AbstractContextManager[object]:
        # Torch works at once: only copies are queued.
        return nullcontext()

    def reads(self, values: torch.Tensor) -> None:
        pass

    def mark(self, *, timed: bool = False) -> ModelEvent:
        event = ModelEvent(self)

        def work() -> bool:
            event.is_over, event.at = True, self._now
            return True

        self._work.append(work)
        return event

    def seconds(self, begun: Event, done: Event) -> float:
        assert isinstance(begun, ModelEvent)
        assert isinstance(done, ModelEvent)
        assert all(event.is_over for event in (begun, done)), (
            "seconds() needs two events that are over"
        )
        return done.at - begun.at

    def wait(self, event: Event) -> None:
        assert isinstance(event, ModelEvent)
        if event.stream not in self.deaf_to:
            self._work.append(event.query)

    @property
    def num_left(self) -> int:
        return len(self._work)

    def step(self) -> bool:
        """Do the next piece of work. Returns False if none is left or it must wait."""
        if not self._work or not self._work[0]():
            return False
        self._work.popleft()
        self._now += 1
        return True


class ModelStreams:
    def __init__(self) -> None:
        self.main, self.to_host, self.to_device = ModelStream(), ModelStream(), ModelStream()
        self.copy_streams = CopyStreams(self.main, self.to_host, self.to_device)
        for stream in self.all:
            stream.beside = self.all

    @property
    def all(self) -> tuple[ModelStream, ...]:
        return (self.main, self.to_host, self.to_device)

    def advance(self, which: Iterable[int]) -> None:
        """Run one step of each of these streams, in this order. which: places in `all`."""
        for stream in which:
            self.all[stream].step()

    def exhaust(self, held: int | None = None) -> None:
        """Run all streams as far as they can go. held: place of a stream that does not run."""
        others = [stream for place, stream in enumerate(self.all) if place != held]
        while any([stream.step() for stream in others]):
            pass

    def drain(self) -> None:
        self.exhaust()
        assert not any(stream.num_left for stream in self.all), (
            "work is left: streams wait for each other"
        )
