"""Messages of a port as frames. Messages that are no frames are counted and dropped."""

from __future__ import annotations

from collections.abc import Callable

from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.frames import Frame
from sglang_kvspec.transport.port import Port
from sglang_kvspec.transport.wire import KV_WIRE, AnyFrame, Buffer, Drop, FrameError, Wire

# Messages read before this end does anything else.
BATCH = 64

Handler = Callable[[bytes, Frame, Buffer | None], None]


def take_in(
    port: Port,
    counters: LinkCounters,
    handle: Handler,
    wrong_protocol: Callable[[bytes, int], None] | None = None,
) -> int:
    """Read waiting messages, up to BATCH, and return their number. `handle` may raise FrameError to
    have a frame counted as dropped."""
    return take_in_of(KV_WIRE, port, counters, handle, wrong_protocol)


def take_in_of(
    wire: Wire[AnyFrame],
    port: Port,
    counters: LinkCounters,
    handle: Callable[[bytes, AnyFrame, Buffer | None], None],
    wrong_protocol: Callable[[bytes, int], None] | None = None,
) -> int:
    """Read waiting messages of any protocol, as take_in() does for KV frames."""
    for num_read in range(BATCH):
        message = port.receive()
        if message is None:
            return num_read
        peer, parts = message
        try:
            handle(peer, *wire.decode(parts))
        except FrameError as error:
            counters.dropped[error.drop] += 1
            if error.hello_protocol is not None and wrong_protocol is not None:
                wrong_protocol(peer, error.hello_protocol)
    return BATCH


def unexpected(frame: Frame) -> FrameError:
    return FrameError(Drop.FOREIGN, f"this end does not accept {type(frame).__name__}")
