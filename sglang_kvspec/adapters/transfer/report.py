"""Totals of links, for /server_info and metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport import ReceiverLoop, SenderLoop
from sglang_kvspec.transport.counters import Durations, LinkCounters


def link_report(loop: SenderLoop | ReceiverLoop) -> dict[str, Any]:
    """Return totals since this end of a link was made, times in seconds. If its loop has ended,
    return only why."""
    counters = _counters_or_end(loop)
    if isinstance(counters, str):
        return {"ended": counters}
    return {
        "streams": {
            stream.name.lower(): {
                "bytes": counted.payload_bytes,
                "frames": counted.frames,
                "resent_bytes": counted.resent_bytes,
                "duplicate_bytes": counted.duplicate_bytes,
                "busy_s": counted.busy_s,
            }
            for stream, counted in counters.streams.items()
        },
        "link_use": counters.link_use(time.monotonic()),
        "transfers": {"completed": counters.completed, "failed": counters.failed},
        "sessions": {"begun": counters.sessions, "lost": counters.lost_sessions},
        "refusals": counters.refusals,
        "dropped_frames": {drop.name.lower(): n for drop, n in counters.dropped.items()},
        "to_anchors": _durations(counters.to_anchors),
        "to_residuals": _durations(counters.to_residuals),
    }


def live_counters(loops: Iterable[SenderLoop | ReceiverLoop]) -> list[LinkCounters]:
    """Return the counters of the loops that have not ended."""
    found = map(_counters_or_end, loops)
    return [counters for counters in found if isinstance(counters, LinkCounters)]


def _counters_or_end(loop: SenderLoop | ReceiverLoop) -> LinkCounters | str:
    """Return the counters of a loop, or why it has ended."""
    try:
        return loop.counters()
    except TransportError as error:
        return str(error)


def _durations(durations: Durations) -> dict[str, Any]:
    mean_s = durations.total_s / durations.count if durations.count else None
    return {"count": durations.count, "mean_s": mean_s, "longest_s": durations.longest_s}
