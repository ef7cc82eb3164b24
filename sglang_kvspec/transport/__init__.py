"""KV pages on a wire, anchors before residuals, from a sender's memory into a receiver's."""

from sglang_kvspec.transport.arrivals import (
    Arrival,
    Destination,
    PageArrived,
    StreamArrived,
    TransferFailed,
)
from sglang_kvspec.transport.flight import FlightLimits
from sglang_kvspec.transport.forked_link import ForkedLink
from sglang_kvspec.transport.frames import PROTOCOL, Identity, Stream
from sglang_kvspec.transport.joined_link import JoinedLink
from sglang_kvspec.transport.keys import CurveKeys
from sglang_kvspec.transport.loops import ReceiverLoop, SenderLoop
from sglang_kvspec.transport.page_memory import PageMemory
from sglang_kvspec.transport.port import ZmqPort
from sglang_kvspec.transport.receiver import Receiver
from sglang_kvspec.transport.segments import SegmentKey, TransferShape
from sglang_kvspec.transport.sender import (
    SegmentReleased,
    Sender,
    SendEvent,
    TransferEnded,
    TransferOpened,
)
from sglang_kvspec.transport.session import LinkState, Timing
from sglang_kvspec.transport.shaping import TokenBucket

__all__ = [
    "PROTOCOL",
    "Arrival",
    "CurveKeys",
    "Destination",
    "FlightLimits",
    "ForkedLink",
    "Identity",
    "JoinedLink",
    "LinkState",
    "PageArrived",
    "PageMemory",
    "Receiver",
    "ReceiverLoop",
    "SegmentKey",
    "SegmentReleased",
    "SendEvent",
    "Sender",
    "SenderLoop",
    "Stream",
    "StreamArrived",
    "Timing",
    "TokenBucket",
    "TransferEnded",
    "TransferFailed",
    "TransferOpened",
    "TransferShape",
    "ZmqPort",
]
