"""Memory that was sent, and when it may be used again."""

from __future__ import annotations

from sglang_kvspec.transport.port import Hold
from sglang_kvspec.transport.segments import Segment, SegmentKey


class Holds:
    """Segments that are released once they will not be sent again and ZMQ is done with them."""

    def __init__(self) -> None:
        self._holds: dict[SegmentKey, list[Hold]] = {}
        self._retired: dict[SegmentKey, None] = {}

    def __len__(self) -> int:
        """Return how many segments ZMQ may still read, or are retired and not released."""
        return len(self._holds.keys() | self._retired.keys())

    def add(self, segment: Segment, hold: Hold) -> None:
        """Record that a piece of the segment was handed to ZMQ."""
        held = [old for old in self._holds.get(segment.key, ()) if not old.done]
        self._holds[segment.key] = [*held, hold]

    def retire(self, segment: Segment) -> None:
        """Record that the segment will not be sent again."""
        self._retired[segment.key] = None

    def release(self) -> list[SegmentKey]:
        """Return, once each, the segments whose memory the caller may use again."""
        free = [key for key in self._retired if all(h.done for h in self._holds.get(key, ()))]
        for key in free:
            del self._retired[key]
            self._holds.pop(key, None)
        return free
