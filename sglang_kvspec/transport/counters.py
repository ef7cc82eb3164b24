"""Counters of a link, for metrics and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.wire import Drop


@dataclass(slots=True)
class StreamCounters:
    """Totals of one stream. payload_bytes: bytes sent or written. resent_bytes: those of them that
    were sent again. duplicate_bytes: bytes that arrived again. busy_s: time with bytes in
    flight."""

    frames: int = 0
    payload_bytes: int = 0
    resent_bytes: int = 0
    duplicate_bytes: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class Durations:
    """Seconds from a transfer's start to a point in it, over transfers that reached the point."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def observe(self, took_s: float) -> None:
        self.count += 1
        self.total_s += took_s
        self.longest_s = max(self.longest_s, took_s)

    def add(self, other: Durations) -> None:
        self.count += other.count
        self.total_s += other.total_s
        self.longest_s = max(self.longest_s, other.longest_s)


@dataclass(slots=True)
class LinkCounters:
    """Totals of one end. A receiver fills to_anchors and to_residuals, a sender busy times."""

    streams: dict[Stream, StreamCounters] = field(
        default_factory=lambda: {stream: StreamCounters() for stream in Stream}
    )
    dropped: Counter[Drop] = field(default_factory=Counter)
    sessions: int = 0
    lost_sessions: int = 0
    refusals: int = 0
    completed: int = 0
    failed: int = 0
    to_anchors: Durations = field(default_factory=Durations)
    to_residuals: Durations = field(default_factory=Durations)
    link_busy_s: float = 0.0
    since_s: float = 0.0

    def snapshot(self) -> LinkCounters:
        """Return a copy. If it is taken on another thread than the end's, related counters may be a
        frame apart."""
        return replace(
            self,
            streams={stream: replace(counters) for stream, counters in self.streams.items()},
            dropped=Counter(self.dropped),
            to_anchors=replace(self.to_anchors),
            to_residuals=replace(self.to_residuals),
        )

    def link_use(self, now_s: float) -> float:
        """Return the share of this end's life in which bytes were in flight."""
        return self.link_busy_s / (now_s - self.since_s) if now_s > self.since_s else 0.0


def sum_of(ends: Sequence[LinkCounters]) -> LinkCounters:
    """Return the totals of several ends, at least one."""
    total = LinkCounters(since_s=min(end.since_s for end in ends))
    for end in ends:
        for stream, counted in end.streams.items():
            into = total.streams[stream]
            for each in fields(StreamCounters):
                setattr(into, each.name, getattr(into, each.name) + getattr(counted, each.name))
        for name in ("sessions", "lost_sessions", "refusals", "completed", "failed", "link_busy_s"):
            setattr(total, name, getattr(total, name) + getattr(end, name))
        total.dropped.update(end.dropped)
        total.to_anchors.add(end.to_anchors)
        total.to_residuals.add(end.to_residuals)
    return total
