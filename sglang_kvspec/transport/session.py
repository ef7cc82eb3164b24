"""One end's half of a live connection: its sequences, the sequences that it has read, and the
silence of the peer. Callers pass the time; no clock is read here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_kvspec.transport.frames import Ack, Ping, SessionFrame
from sglang_kvspec.transport.replay import ReplayWindow
from sglang_kvspec.transport.wire import Drop, FrameError

# Seconds between a busy end's looks at its timers.
WATCH_S = 0.005


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of a link. heartbeat_s: between Pings of an idle connection. probe_s: between Pings
    while the peer owes acknowledgements. silence_s: silence after which the connection counts as
    lost. gone_s: silence after which its transfers fail, unless there is a new connection.
    retry_s: between repeats of a Hello, or of an Open that is not accepted."""

    heartbeat_s: float = 0.5
    probe_s: float = 0.1
    silence_s: float = 3.0
    gone_s: float = 30.0
    retry_s: float = 0.5


class LinkState(Enum):
    """State of a receiver, or of a prefix server's client. GREETING: no session; the greeting is
    repeated. LIVE: in a session. REFUSED: a receiver for good, a client until it asks again."""

    GREETING = 0
    LIVE = 1
    REFUSED = 2


class Session:
    def __init__(self, session: int, timing: Timing, now_s: float) -> None:
        self.session = session
        self.heard_s = now_s
        self._timing = timing
        self._window = ReplayWindow()
        self._last = 0
        self._pinged_s = now_s
        self._owes_ack = False
        self._echo = 0

    def stamp(self) -> int:
        """Take the sequence of the next frame."""
        self._last += 1
        return self._last

    def admit(self, frame: SessionFrame, now_s: float) -> None:
        """Record that a frame was read. Raises FrameError if it is of another session, was read
        before, or is an Ack of frames that were never sent."""
        if frame.session != self.session:
            raise FrameError(
                Drop.FOREIGN, f"the frame has session {frame.session}, expected {self.session}"
            )
        if isinstance(frame, Ack) and max(frame.highest, frame.echo) > self._last:
            detail = f"the Ack is for frame {frame.highest}, last sent {self._last}"
            raise FrameError(Drop.MALFORMED, detail)
        if not self._window.admit(frame.sequence):
            raise FrameError(
                Drop.REPLAYED, f"sequence {frame.sequence} was read before or is too old"
            )
        self.heard_s = now_s
        if isinstance(frame, Ping):
            self._echo = frame.sequence
        self._owes_ack |= not isinstance(frame, Ack)

    def is_silent(self, now_s: float) -> bool:
        return now_s - self.heard_s >= self._timing.silence_s

    def ping(self, now_s: float, *, awaits_ack: bool) -> Ping | None:
        """Return the Ping that is due; None if none is."""
        period_s = self._timing.probe_s if awaits_ack else self._timing.heartbeat_s
        if now_s - max(self._pinged_s, self.heard_s if awaits_ack else 0.0) < period_s:
            return None
        self._pinged_s = now_s
        return Ping(self.session, self.stamp())

    def ack(self, credit_bytes: int, *, if_owed: bool = True) -> Ack | None:
        """Return an Ack of all that was read; None if none is owed, unless if_owed is False."""
        if if_owed and not self._owes_ack:
            return None
        frame = Ack(
            self.session,
            self.stamp(),
            self._window.highest,
            self._window.bitmap(),
            self._echo,
            credit_bytes,
        )
        self._owes_ack, self._echo = False, 0
        return frame
