"""Streams of a GPU for copies, and the fences between them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_kvspec.kv.batched_copies import copy_rows_at_once

# (target, source): contiguous, of one shape and dtype.
Copy = tuple[torch.Tensor, torch.Tensor]


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Return True if all work before this event is done. Do not wait."""
        ...

    def synchronize(self) -> None:
        """Block the CPU until all work before this event is done."""
        ...


class CopyStream(Protocol):
    """Stream of copies, which run in the order given. No method blocks the CPU."""

    def copy(self, copies: Sequence[Copy]) -> None: ...

    def copy_pages(
        self,
        target: torch.Tensor,
        target_rows: Sequence[int],
        source: torch.Tensor,
        source_rows: Sequence[int],
    ) -> None:
        """Copy target[target_rows[i]] = source[source_rows[i]] by a copy engine. One tensor is in
        pinned memory, both are contiguous, with rows of one shape and dtype. There is at least one
        row, and target_rows are distinct."""
        ...

    def copy_rows(
        self,
        target: torch.Tensor,
        target_rows: torch.Tensor,
        source: torch.Tensor,
        source_rows: torch.Tensor,
    ) -> None:
        """Copy target[target_rows[i]] = source[source_rows[i]] of one layer: see
        `kvspec_kernels.ops.copy_rows`."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which torch enqueues work on this stream. Memory that is allocated
        there is used there only, and may be reused as soon as it is freed."""
        ...

    def reads(self, values: torch.Tensor) -> None:
        """Note that this stream's work reads memory that another stream allocated. The memory is
        reused once that work is done."""
        ...

    def mark(self, *, timed: bool = False) -> Event:
        """Return the point after all work given so far. timed: for `seconds`."""
        ...

    def seconds(self, begun: Event, done: Event) -> float:
        """Return the seconds between two timed marks of this stream that are over."""
        ...

    def wait(self, event: Event) -> None:
        """Make work given after this call wait for the event, which may be another stream's."""
        ...


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """Streams of one device. main: runs kernels. to_host, to_device: copies in one direction each,
    on a copy engine of its own."""

    main: CopyStream
    to_host: CopyStream
    to_device: CopyStream


def make_copy_streams(device: torch.device) -> CopyStreams:
    """Return side streams on a GPU. On a CPU, return streams that copy at once."""
    main = CudaStream(device) if device.type == "cuda" else SyncStream()
    return CopyStreams(main, make_copy_stream(device), make_copy_stream(device))


def make_copy_stream(device: torch.device) -> CopyStream:
    """Return a new side stream of a GPU. On a CPU, return a stream that copies at once."""
    if device.type != "cuda":
        return SyncStream()
    return CudaStream(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class CudaStream:
    """CopyStream of a GPU: the stream given, or else the current stream at each call."""

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
        # Late import: the module imports Triton, which a CPU does not need.
        from kvspec_kernels.ops.copy_rows import copy_rows

        stream = self.stream
        for rows in (target_rows, source_rows):
            # The allocator must not reuse the memory of indices before the stream has read it.
            rows.record_stream(stream)
        with torch.cuda.stream(stream):
            copy_rows(target, target_rows, source, source_rows)

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def reads(self, values: torch.Tensor) -> None:
        values.record_stream(self.stream)

    def mark(self, *, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def seconds(self, begun: Event, done: Event) -> float:
        assert isinstance(begun, torch.cuda.Event), "the event must be a CUDA event"
        assert isinstance(done, torch.cuda.Event), "the event must be a CUDA event"
        return begun.elapsed_time(done) / 1e3  # type: ignore[no-any-return]

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event), "the event must be a CUDA event"
        self.stream.wait_event(event)


class _Past:
    """Event of a SyncStream, whose work is always done."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class SyncStream:
    """CopyStream of a CPU, which copies at once."""

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

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def reads(self, values: torch.Tensor) -> None:
        pass

    def mark(self, *, timed: bool = False) -> Event:
        return _Past()

    def seconds(self, begun: Event, done: Event) -> float:
        assert isinstance(begun, _Past), "the event must come from a SyncStream"
        assert isinstance(done, _Past), "the event must come from a SyncStream"
        return done.at - begun.at

    def wait(self, event: Event) -> None:
        assert event.query(), "a SyncStream cannot wait for an unfinished event"


def copies_of_rows(
    target: torch.Tensor,
    target_rows: Sequence[int],
    source: torch.Tensor,
    source_rows: Sequence[int],
) -> list[Copy]:
    """Return the copies that CopyStream.copy_pages() makes: one for each run of rows that are
    neighbours in both tensors."""
    return [
        (target[to : to + count], source[origin : origin + count])
        for to, origin, count in runs_of(zip(target_rows, source_rows, strict=True))
    ]


def runs_of(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, first, count) for each longest run of pairs that are neighbours on both
    sides."""
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
