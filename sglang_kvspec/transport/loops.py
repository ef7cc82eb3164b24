"""Both ends of a link, each on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_kvspec.core.errors import HandshakeRefused, TransportError
from sglang_kvspec.transport.arrivals import Arrival, Destination, TransferFailed
from sglang_kvspec.transport.loop import Loop
from sglang_kvspec.transport.receiver import Receiver
from sglang_kvspec.transport.segments import SegmentKey, TransferShape
from sglang_kvspec.transport.sender import SegmentReleased, Sender, SendEvent
from sglang_kvspec.transport.session import LinkState


class SenderLoop(Loop[SendEvent]):
    """Owner of a Sender and of the thread that steps it."""

    def __init__(self, sender: Sender, on_news: Callable[[], None] | None = None) -> None:
        self._sender = sender
        self._kept: dict[SegmentKey, memoryview] = {}
        super().__init__(sender, "sender's loop", on_news)

    def offer(self, key: SegmentKey, memory: memoryview) -> None:
        """Queue a Sender.offer(). The loop keeps the memory until its SegmentReleased is taken.
        Each offer has one, even an offer that came too late to be sent. A chunk that does not fit
        ends its transfer, with the reason in TransferEnded."""
        view = memory.cast("B")
        if not len(view):
            raise TransportError(f"{key} has no bytes")
        with self._lock:
            if key in self._kept:
                raise TransportError(f"{key} was already offered")
            self._post(lambda: self._offer(key, view))
            self._kept[key] = view

    def abort(self, transfer: int, reason: str) -> None:
        """Queue a Sender.abort()."""
        self._post(lambda: self._sender.abort(transfer, reason))

    def take_events(self, timeout_s: float = 0.0) -> list[SendEvent]:
        events = super().take_events(timeout_s)
        with self._lock:
            for event in events:
                if isinstance(event, SegmentReleased):
                    self._kept.pop(event.key, None)
        return events

    def _offer(self, key: SegmentKey, view: memoryview) -> None:
        try:
            taken = self._sender.offer(key, view)
        except TransportError as error:
            taken = False
            self._sender.abort(key.transfer, str(error))
        if not taken:
            self._tell([SegmentReleased(key)])


class ReceiverLoop(Loop[Arrival]):
    """Owner of a Receiver and of the thread that steps it. Each expected transfer has one last
    event: TransferFailed, or its last StreamArrived. Until that event is taken, the loop's thread
    may write into the transfer's pages, and asks its Destination for them."""

    def __init__(self, receiver: Receiver, on_news: Callable[[], None] | None = None) -> None:
        self._receiver = receiver
        super().__init__(receiver, "receiver's loop", on_news)

    @property
    def refusal(self) -> str | None:
        """Return why the sender refuses this receiver; None if it does not."""
        self._check()
        return self._receiver.refusal

    @property
    def state(self) -> LinkState:
        self._check()
        return self._receiver.state

    def expect(
        self,
        transfer: int,
        pages: Sequence[tuple[int, int]],
        shape: TransferShape,
        destination: Destination,
        timeout_s: float = float("inf"),
    ) -> None:
        """Queue a Receiver.expect(). A transfer that cannot be expected fails, with the reason in
        TransferFailed. So does a transfer that is expected already."""
        if (refusal := self.refusal) is not None:
            raise HandshakeRefused(refusal)
        refs = tuple(pages)
        self._post(lambda: self._expect(transfer, refs, shape, destination, timeout_s))

    def cancel(self, transfer: int, reason: str) -> None:
        """Queue a Receiver.cancel(). TransferFailed tells when it is done, unless the transfer was
        complete before."""
        self._post(lambda: self._receiver.cancel(transfer, reason))

    def _expect(
        self,
        transfer: int,
        pages: Sequence[tuple[int, int]],
        shape: TransferShape,
        destination: Destination,
        timeout_s: float,
    ) -> None:
        try:
            self._receiver.expect(transfer, pages, shape, destination, timeout_s)
        except TransportError as error:
            is_expected = self._receiver.missing(transfer) is not None
            self._receiver.cancel(transfer, str(error))
            if not is_expected:
                self._tell([TransferFailed(transfer, str(error))])
