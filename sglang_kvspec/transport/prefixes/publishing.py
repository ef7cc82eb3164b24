"""Pages on their way to a prefix server, in the order of add(). No sockets, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sglang_kvspec.transport.prefixes.events import PublishEnded
from sglang_kvspec.transport.prefixes.frames import (
    STORE_PIECE_BYTES,
    Chain,
    Kept,
    Part,
    Publish,
)
from sglang_kvspec.transport.wire import Drop, FrameError

# Unanswered bytes at which no new page starts: a lookup waits behind them on the link.
PUBLISH_WINDOW_BYTES = 2 << 20

Outgoing = tuple[Publish | Part, memoryview | None]


@dataclass(slots=True)
class _Upload:
    number: int
    chain: Chain
    content: memoryview
    num_sent: int | None = None

    @property
    def is_sent(self) -> bool:
        return self.num_sent == len(self.content)


class Publishing:
    def __init__(self) -> None:
        self._waiting: deque[_Upload] = deque()
        self._unanswered: deque[_Upload] = deque()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._unanswered)

    def add(self, upload: int, chain: Chain, content: memoryview) -> None:
        """Queue a page. content: its anchor, then its residual."""
        self._waiting.append(_Upload(upload, chain, content))

    def next_frame(self, session: int) -> Outgoing | None:
        """Return the frame to send now, to be confirmed by sent(); None if no page waits, or too
        much is unanswered."""
        if not self._waiting:
            return None
        upload = self._waiting[0]
        if upload.num_sent is None:
            if sum(len(each.content) for each in self._unanswered) >= PUBLISH_WINDOW_BYTES:
                return None
            return Publish(session, upload.number, *upload.chain), None
        piece = upload.content[upload.num_sent : upload.num_sent + STORE_PIECE_BYTES]
        return Part(session, upload.number, upload.num_sent, len(piece)), piece

    def sent(self, outgoing: Outgoing) -> None:
        upload = self._waiting[0]
        _, piece = outgoing
        upload.num_sent = 0 if piece is None else (upload.num_sent or 0) + len(piece)
        if upload.is_sent:
            self._unanswered.append(self._waiting.popleft())

    def kept(self, frame: Kept) -> list[PublishEnded]:
        """Apply an answer. The prefix server answers in order, so uploads that it passes over were
        not kept. Raises FrameError for an upload that was not sent."""
        if all(upload.number != frame.upload for upload in self._unanswered):
            raise FrameError(Drop.UNKNOWN, f"upload {frame.upload} awaits no answer")
        ended = []
        while (number := self._unanswered.popleft().number) != frame.upload:
            ended.append(PublishEnded(number, is_kept=False))
        return [*ended, PublishEnded(number, is_kept=frame.is_kept)]

    def end_all(self) -> list[PublishEnded]:
        """End all uploads, because the link is lost."""
        ended = [
            PublishEnded(upload.number, is_kept=False)
            for upload in (*self._unanswered, *self._waiting)
        ]
        self._waiting.clear()
        self._unanswered.clear()
        return ended
