"""When the tokens of a round reach their streams: pure decisions, the clock is handed in.

A verification emits several tokens at once. Handed on at once they make a stream stutter: a burst,
then silence until the next round. The pacer spreads them evenly between the token before them and
the time at which the next round is expected to end, and a little more: tokens that are left when
that round comes fill the gap behind it if it brings few.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Generic, TypeVar

Item = TypeVar("Item")

# Time over which tokens are spread, relative to the longest that a round is expected to take. With
# less, a stream runs dry behind a rejected draft; with more, tokens reach their time limit.
MARGIN = 1.15
# Weight of the newest round in what is learned of the others.
WEIGHT = 0.25
# Rounds take between half and twice the time that was expected; what is beyond is a prefill's.
RATIOS = (0.5, 2.0)


@dataclass(slots=True)
class _Stream(Generic[Item]):
    """One answer under way. Times in seconds.

    held: items that wait, with the time at which each is due, ascending. num_old: how many of them,
    the first ones, were left by the round before this one. following: tokens of the round that
    have not come yet. expected_s: what the round under way is expected to take, 0 for unknown.
    mean_s: mean time of a round. ratio, spread: time of rounds over what was expected, mean and
    mean deviation. first_due, step_s: when this round's first token is due, and the time between
    two tokens. limit: time by which every token of this round is due. last: when an item left.
    """

    began: float
    held: deque[tuple[float, Item]] = field(default_factory=deque)
    num_old: int = 0
    following: int = 0
    index: int = 0
    expected_s: float = 0.0
    mean_s: float = 0.0
    ratio: float = 1.0
    spread: float = 0.1
    first_due: float = 0.0
    step_s: float = 0.0
    limit: float = 0.0
    last: float = 0.0

    def begin_round(self, now: float, num_tokens: int, expected_s: float) -> None:
        """Spread num_tokens, behind those that are held, evenly between the last item that left and
        the next round. A round that brings one token makes two gaps of what would be one.

        Unless it is given, the next round is expected to take what the last one took, or what
        rounds take in the mean, if that is more. Items that the last two rounds left are due.
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
        longest_s = self.expected_s * (self.ratio + self.spread)
        self.limit = now + longest_s
        num_kept = len(self.held) - self.num_old
        num_items, end = num_kept + num_tokens, now + MARGIN * longest_s
        self.step_s = (end - self.last) / (num_items + 1)
        first = self.last + self.step_s
        if first < now or not expected_s:
            # The gap before this round is the longest already, or what is expected is a guess.
            first, self.step_s = now, (end - now) / num_items
        for i, (due, item) in enumerate(self.held):
            # None is moved beyond the time that its own round was expected to take.
            new = now if i < self.num_old else first + (i - self.num_old) * self.step_s
            self.held[i] = (min(due, new), item)
        self.first_due = first + num_kept * self.step_s
        # Items of rounds before the last one are due, and counted off as they leave.
        self.num_old = len(self.held)

    def hold(self, item: Item) -> float:
        """Put the round's next item behind those that are held; return the time it is due at."""
        due = min(self.first_due + self.index * self.step_s, self.limit)
        self.index += 1
        self.held.append((due, item))
        return due

    def release(self, now: float) -> list[Item]:
        """Take out what is due."""
        items = []
        while self.held and self.held[0][0] <= now:
            items.append(self.held.popleft()[1])
            self.num_old = max(self.num_old - 1, 0)
            self.last = now
        return items


class StreamPacer(Generic[Item]):
    """Holds items, one a token, until their time has come; in the order in which they came.

    No item is held for longer than its stream's next round is expected to take at most, beyond the
    round after that, or once its stream has ended.
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
            return [*(stream.release(inf) if stream else ()), item]
        if stream is None:
            stream = self._streams[key] = _Stream(now, limit=now)
        elif not stream.following:
            stream.begin_round(now, following + 1, expected_s)
            # Items that are held may be due earlier than before.
            for due, _ in stream.held:
                self._note(due, key)
        stream.following = following
        self._note(stream.hold(item), key)
        return stream.release(now)

    def _note(self, due: float, key: str) -> None:
        heapq.heappush(self._due, (due, next(self._numbers), key))

    def take_due(self, now: float) -> list[Item]:
        """Take out the items whose time has come."""
        items = []
        while self._due and self._due[0][0] <= now:
            _, _, key = heapq.heappop(self._due)
            stream = self._streams.get(key)
            if stream is not None:
                items += stream.release(now)
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
