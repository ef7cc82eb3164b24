"""When memory that was sent may be used again."""

from __future__ import annotations

from sglang_kvspec.transport.port import Hold
from sglang_kvspec.transport.segments import Segment, SegmentKey


class Holds:
    """A segment is released once nobody will send it any more and ZMQ no longer reads it."""

    def __init__(self) -> None:
        self._holds: dict[SegmentKey, list[Hold]] = {}
        self._retired: dict[SegmentKey, None] = {}

    def __len__(self) -> int:
        """Segments that ZMQ may still read, or that may be sent."""
        return len(self._holds.keys() | self._retired.keys())

    def add(self, segment: Segment, hold: Hold) -> None:
        """A piece of the segment was handed to ZMQ."""
        held = [old for old in self._holds.get(segment.key, ()) if not old.done]
        self._holds[segment.key] = [*held, hold]

    def retire(self, segment: Segment) -> None:
        """Nobody will send it any more."""
        self._retired[segment.key] = None

    def release(self) -> list[SegmentKey]:
        """Segments whose memory is the caller's again, each once."""
        free = [key for key in self._retired if all(h.done for h in self._holds.get(key, ()))]
        for key in free:
            del self._retired[key]
            self._holds.pop(key, None)
        return free
