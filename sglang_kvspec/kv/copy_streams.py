"""Orders of work that run beside each other: a GPU's streams, and the fences between them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_kvspec.kv.batched_copies import copy_rows_at_once

# (target, source): contiguous, of one shape and dtype.
Copy = tuple[torch.Tensor, torch.Tensor]


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether all work before it is done. Does not wait."""
        ...

    def synchronize(self) -> None:
        """The CPU waits until it is."""
        ...


class CopyStream(Protocol):
    """Does its work in the order given. Nothing here makes the CPU wait."""

    def copy(self, copies: Sequence[Copy]) -> None: ...

    def copy_pages(
        self,
        target: torch.Tensor,
        target_rows: Sequence[int],
        source: torch.Tensor,
        source_rows: Sequence[int],
    ) -> None:
        """target[target_rows[i]] = source[source_rows[i]] of contiguous tensors with rows alike, at
        least one, target_rows distinct: by a copy engine, one side in pinned memory."""
        ...

    def copy_rows(
        self,
        target: torch.Tensor,
        target_rows: torch.Tensor,
        source: torch.Tensor,
        source_rows: torch.Tensor,
    ) -> None:
        """target[target_rows[i]] = source[source_rows[i]] of one layer: see
        `kvspec_kernels.ops.copy_rows`."""
        ...

    def mark(self, *, timed: bool = False) -> Event:
        """The point after all work given so far. timed: for `seconds`."""
        ...

    def seconds(self, begun: Event, done: Event) -> float:
        """Between two timed marks of this stream that are over."""
        ...

    def wait(self, event: Event) -> None:
        """Work given from now on begins after the event, which may be another stream's."""
        ...


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """main: what kernels run in. to_host, to_device: copies in either direction, each on an engine
    of its own."""

    main: CopyStream
    to_host: CopyStream
    to_device: CopyStream


def make_copy_streams(device: torch.device) -> CopyStreams:
    """Side streams on a GPU; on a CPU everything happens when it is asked for."""
    if device.type != "cuda":
        return CopyStreams(SyncStream(), SyncStream(), SyncStream())
    side = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    return CopyStreams(CudaStream(device), *(CudaStream(device, stream) for stream in side))


class CudaStream:
    """A stream of a GPU, or, without one, whichever is the current stream when work comes."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device, self._stream = device, stream

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)

    def copy(self, copies: Sequence[Copy]) -> None:
        with torch.cuda.stream(self.stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)

    def copy_pages(
        self,
        target: torch.Tensor,
        target_rows: Sequence[int],
        source: torch.Tensor,
        source_rows: Sequence[int],
    ) -> None:
        if not copy_rows_at_once(target, target_rows, source, source_rows, self.stream):
            self.copy(copies_of_rows(target, target_rows, source, source_rows))

    def copy_rows(
        self,
        target: torch.Tensor,
        target_rows: torch.Tensor,
        source: torch.Tensor,
        source_rows: torch.Tensor,
    ) -> None:
        # Late: it imports Triton, which a CPU does without.
        from kvspec_kernels.ops.copy_rows import copy_rows

        stream = self.stream
        for rows in (target_rows, source_rows):
            # Their memory is not to be used again before the stream has read it.
            rows.record_stream(stream)
        with torch.cuda.stream(stream):
            copy_rows(target, target_rows, source, source_rows)

    def mark(self, *, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def seconds(self, begun: Event, done: Event) -> float:
        assert isinstance(begun, torch.cuda.Event), "an event of another device"
        assert isinstance(done, torch.cuda.Event), "an event of another device"
        return begun.elapsed_time(done) / 1e3  # type: ignore[no-any-return]

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event), "an event of another device"
        self.stream.wait_event(event)


class _Past:
    """An event of a stream whose work is done as it is given."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class SyncStream:
    """Copies at once."""

    def copy(self, copies: Sequence[Copy]) -> None:
        for target, source in copies:
            target.copy_(source)

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
        target[target_rows.long()] = source[source_rows.long()]

    def mark(self, *, timed: bool = False) -> Event:
        return _Past()

    def seconds(self, begun: Event, done: Event) -> float:
        assert isinstance(begun, _Past), "an event of another stream"
        assert isinstance(done, _Past), "an event of another stream"
        return done.at - begun.at

    def wait(self, event: Event) -> None:
        assert event.query(), "a stream that copies at once cannot wait for what is not done"


def copies_of_rows(
    target: torch.Tensor,
    target_rows: Sequence[int],
    source: torch.Tensor,
    source_rows: Sequence[int],
) -> list[Copy]:
    """What CopyStream.copy_pages() does, a copy for rows that are neighbours on both sides."""
    return [
        (target[to : to + count], source[origin : origin + count])
        for to, origin, count in runs_of(zip(target_rows, source_rows, strict=True))
    ]


def runs_of(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first, first, count) for the longest runs of neighbours whose partners are neighbours."""
    first: tuple[int, int] | None = None
    count = 0
    for one, other in sorted(pairs):
        if first is not None and (one, other) == (first[0] + count, first[1] + count):
            count += 1
            continue
        if first is not None:
            yield (*first, count)
        first, count = (one, other), 1
    if first is not None:
        yield (*first, count)
