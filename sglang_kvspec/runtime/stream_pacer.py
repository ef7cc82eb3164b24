"""When the tokens of a round reach their streams: pure decisions, the clock is handed in.

A verification emits several tokens at once. Handed on at once they make a stream stutter: a burst,
then silence until the next round. The pacer spreads them over the time that the next round is
expected to take.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")

# Weight of the newest round in what is learned of the others.
WEIGHT = 0.25
# Rounds take between half and twice the time that was expected; what is beyond is a prefill's.
RATIOS = (0.5, 2.0)


@dataclass(slots=True)
class _Stream(Generic[Item]):
    """One answer under way. Times in seconds.

    held: items that wait, with the time at which each is due. following: tokens of the round that
    have not come yet. expected_s: what the round under way is expected to take, 0 for unknown.
    mean_s: mean time of a round. ratio, spread: time of rounds over what was expected, mean and
    mean deviation. step_s: time between two tokens of this round.
    """

    began: float
    held: deque[tuple[float, Item]] = field(default_factory=deque)
    following: int = 0
    index: int = 0
    expected_s: float = 0.0
    mean_s: float = 0.0
    ratio: float = 1.0
    spread: float = 0.1
    step_s: float = 0.0

    def begin_round(self, now: float, num_tokens: int, expected_s: float) -> None:
        """Spread num_tokens over the time until the next round.

        Unless it is given, the next round is expected to take what the last one took, or what
        rounds take in the mean, if that is more. The time is rather too long than too short: what
        is left over leaves at once when the next round comes, but a stream that has run dry stands
        still until then.
        """
        elapsed_s = now - self.began
        if self.expected_s:
            least, most = RATIOS
            ratio = min(max(elapsed_s / self.expected_s, least), most)
            self.spread += WEIGHT * (abs(ratio - self.ratio) - self.spread)
            self.ratio += WEIGHT * (ratio - self.ratio)
        self.mean_s += (WEIGHT if self.mean_s else 1.0) * (elapsed_s - self.mean_s)
        self.began, self.index = now, 0
        self.expected_s = expected_s or max(elapsed_s, self.mean_s)
        self.step_s = self.expected_s * (self.ratio + self.spread) / num_tokens

    def release(self) -> list[Item]:
        """Take out everything that is held."""
        items = [item for _, item in self.held]
        self.held.clear()
        return items


class StreamPacer(Generic[Item]):
    """Holds items, one a token, until their time has come; in the order in which they came.

    No item is held beyond the next round of its stream, and none once its stream has ended.
    """

    def __init__(self) -> None:
        self._streams: dict[str, _Stream[Item]] = {}
        # (due, number, key) of held items; an entry whose item has left says nothing.
        self._due: list[tuple[float, int, str]] = []
        self._numbers = count()

    def receive(
        self,
        key: str,
        item: Item,
        *,
        following: int,
        is_last: bool,
        now: float,
        expected_s: float = 0.0,
    ) -> list[Item]:
        """Take one token of a stream; return what is to be handed on now, oldest first.

        following: tokens of the same round that come behind this one. is_last: the answer ends.
        expected_s: time until the stream's next round, 0 for unknown.
        """
        stream = self._streams.get(key)
        if is_last:
            self._streams.pop(key, None)
            return [*(stream.release() if stream else ()), item]
        if stream is None:
            stream = self._streams[key] = _Stream(now)
            stream.following = following
            return [item]
        if not stream.following:
            ready = stream.release()
            stream.begin_round(now, following + 1, expected_s)
            stream.following = following
            return [*ready, item]
        stream.following = following
        stream.index += 1
        due = stream.began + stream.index * stream.step_s
        if due <= now and not stream.held:
            return [item]
        stream.held.append((due, item))
        heapq.heappush(self._due, (due, next(self._numbers), key))
        return []

    def take_due(self, now: float) -> list[Item]:
        """Take out the items whose time has come."""
        items = []
        while self._due and self._due[0][0] <= now:
            _, _, key = heapq.heappop(self._due)
            stream = self._streams.get(key)
            while stream is not None and stream.held and stream.held[0][0] <= now:
                items.append(stream.held.popleft()[1])
        return items

    def next_due(self) -> float | None:
        """Return the time of the next held item, None where nothing is held."""
        while self._due:
            due, _, key = self._due[0]
            stream = self._streams.get(key)
            if stream is not None and stream.held:
                # An entry of an item that has left may be earlier: the caller asks again then.
                return due
            heapq.heappop(self._due)
        return None

    def drop(self, key: str) -> None:
        """Forget a stream that no client reads any more."""
        self._streams.pop(key, None)

    @property
    def num_streams(self) -> int:
        return len(self._streams)
