"""Pacing of a round's tokens in their streams: pure decisions, for times that the caller passes.

A verification emits several tokens at once. Sent at once, they make a stream stutter: a burst, then
silence until the next round. The pacer spreads tokens evenly from the token before them to a little
after the expected end of the next round. If that round brings few tokens, the tokens that are left
fill the gap behind it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Generic, TypeVar

Item = TypeVar("Item")

# Time over which tokens are spread, relative to the longest expected time of a round. With less, a
# stream runs dry after a rejected draft; with more, tokens reach their time limit.
MARGIN = 1.15
# Weight of the newest round in running means.
WEIGHT = 0.25
# Bounds of a round's measured time over its expected time: a longer round contains a prefill.
RATIOS = (0.5, 2.0)


@dataclass(slots=True)
class _Stream(Generic[Item]):
    """Stream of one unfinished answer. Times in seconds.

    began: start of the current round. held: items that wait, with their due times, ascending.
    num_old: number of the first items of `held` that the previous round left. following: tokens of
    the round that have not come yet. expected_s: expected time of the current round, 0 for unknown.
    mean_s: mean time of a round. ratio, spread: mean and mean deviation of a round's time over its
    expected time. first_due, step_s: due time of this round's first token, and the time between two
    tokens. limit: time by which every token of this round is due. last: when an item was last
    released.
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
        """Spread num_tokens, behind the held items, evenly between the last released item and the
        next round. A single token splits that gap in two.

        expected_s: expected time of the next round. For 0, it is the time of the last round, or the
        mean of all rounds if that is longer. Items that two rounds have left are due at once.
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
            # The gap before this round is already the longest, or the expected time is a guess.
            first, self.step_s = now, (end - now) / num_items
        for i, (due, item) in enumerate(self.held):
            # No item is moved beyond the time limit of its own round.
            new = now if i < self.num_old else first + (i - self.num_old) * self.step_s
            self.held[i] = (min(due, new, self.limit), item)
        self.first_due = first + num_kept * self.step_s
        # Items of rounds before the last one are due, and counted off as they leave.
        self.num_old = len(self.held)

    def hold(self, item: Item) -> float:
        """Append the round's next item to the held items. Return its due time."""
        due = min(self.first_due + self.index * self.step_s, self.limit)
        self.index += 1
        self.held.append((due, item))
        return due

    def release(self, now: float) -> list[Item]:
        """Remove and return the items that are due."""
        items = []
        while self.held and self.held[0][0] <= now:
            items.append(self.held.popleft()[1])
            self.num_old = max(self.num_old - 1, 0)
            self.last = now
        return items


class StreamPacer(Generic[Item]):
    """Pacer that holds items, one a token, until they are due. Items of a stream stay in order.

    No item is held for longer than the longest expected time of its stream's next round. None is
    held beyond the round after that, or once its stream has ended.
    """

    def __init__(self) -> None:
        self._streams: dict[str, _Stream[Item]] = {}
        # (due, number, key) of held items. An entry whose item has been released is ignored.
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
        """Take one token of a stream. Return the items to send now, oldest first.

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
            # A new round may make held items due earlier.
            for due, _ in stream.held:
                self._note(due, key)
        stream.following = following
        self._note(stream.hold(item), key)
        return stream.release(now)

    def _note(self, due: float, key: str) -> None:
        heapq.heappush(self._due, (due, next(self._numbers), key))

    def take_due(self, now: float) -> list[Item]:
        """Remove and return the items of all streams that are due."""
        items = []
        while self._due and self._due[0][0] <= now:
            _, _, key = heapq.heappop(self._due)
            stream = self._streams.get(key)
            if stream is not None:
                items += stream.release(now)
        return items

    def next_due(self) -> float | None:
        """Return the time of the next held item; None if no item is held."""
        while self._due:
            due, _, key = self._due[0]
            stream = self._streams.get(key)
            if stream is not None and stream.held:
                # The entry may be of an item that was released, and too early: the caller asks
                # again then.
                return due
            heapq.heappop(self._due)
        return None

    def drop(self, key: str) -> None:
        """Forget a stream that no client reads any more."""
        self._streams.pop(key, None)

    @property
    def num_streams(self) -> int:
        return len(self._streams)
