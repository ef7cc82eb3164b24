"""Two ranks in threads of one process, which fail if they do different things."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_kvspec.runtime.ranks import Ranks

BOTH = (0, 1)


class RankExchange:
    """Exchange of values between the two ranks."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(len(BOTH))
        self._brought: dict[int, tuple[str, Any]] = {}
        self._threads = ThreadPoolExecutor(len(BOTH))
        self.num_messages = 0

    def exchange(self, rank: int, about: str, mine: Any) -> list[Any]:
        """Return the values of both ranks. Raises AssertionError if their `about` differs."""
        self._brought[rank] = about, mine
        self._barrier.wait()
        first, second = (self._brought[rank] for rank in BOTH)
        self._barrier.wait()
        assert first[0] == second[0], f"rank 0 exchanges {first[0]}, rank 1 {second[0]}"
        return [first[1], second[1]]

    def act(self, act: Callable[[int], None]) -> None:
        """Run `act` on both ranks at the same time. Raises the error of either rank."""

        def run(rank: int) -> None:
            try:
                act(rank)
                self.exchange(rank, "the end", None)
            except BaseException:
                # This rank exchanges no more values: release the other rank.
                self._barrier.abort()
                raise

        done = [self._threads.submit(run, rank) for rank in BOTH]
        errors = [error for future in done if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error

    def close(self) -> None:
        self._threads.shutdown()


class ExchangingRanks(Ranks):
    """One of the two ranks. Only least() exchanges values."""

    def __init__(self, rank: int, exchange: RankExchange) -> None:
        super().__init__(rank, len(BOTH))
        self._exchange = exchange

    def least(self, mine: Sequence[int], about: object) -> list[int]:
        self._exchange.num_messages += self.is_first
        both = self._exchange.exchange(self.rank, repr(about), list(mine))
        return [min(pair) for pair in zip(*both, strict=True)]
