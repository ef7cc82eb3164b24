"""A share of the prompts, so that several processes can run one scenario together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """The index-th of `count` shares, counted from 1."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """ "2/3" is the second of three. Raises ValueError for anything else."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"a shard is I/N with 1 <= I <= N, got {text!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, entries: Sequence[T]) -> tuple[T, ...]:
        """Return every count-th entry. All shares together have each entry once."""
        return tuple(entries[self.index - 1 :: self.count])


WHOLE = Shard()
