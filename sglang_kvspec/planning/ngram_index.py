"""Index of the n-grams of a growing text: what followed its newest tokens when they came last."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Lengths of n-grams. One token has too many followers. More than six tells occurrences apart that
# six do not, which is rare.
SHORTEST, LONGEST = 2, 6
# Tokens that an index keeps, 5 bytes each.
MOST_TOKENS = 65_536
# Places whose lowest bytes match, and whose tokens do not, that a search looks at. Text has few. A
# prompt of tokens with one lowest byte has as many as tokens, which would take the CPU 0.1 s.
MOST_MISSES = 128
# Place of the lowest byte of a token, and bytes of a token.
LOWEST, TOKEN_BYTES = (0 if sys.byteorder == "little" else 3), 4
# Separates the texts of several requests. No model has this token.
SEPARATOR = -1


class Match(NamedTuple):
    """Occurrence of the newest tokens. length: how many of them occurred. end: index of the last
    one among the kept tokens; another token follows it."""

    length: int
    end: int


class NgramIndex:
    """Index of all n-grams of SHORTEST to LONGEST tokens of one text.

    Tokens are added and never rolled back: drafts, which may be, are passed to find() instead.
    Above most_tokens, the index forgets its older half. Equal calls give equal results, so ranks
    agree without a message.

    Nothing is prepared as the text grows: a prompt would take the CPU 4 us a token just as its
    request begins to draft. find() searches the lowest bytes of all tokens instead, 6 us for 1,000
    tokens, and compares whole tokens where these bytes match.

    SGLang's NgramCorpus holds the text of all requests in one trie. A request would be proposed the
    text of another, which its timing could reveal. The trie also needs a C++ compiler at the start.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        if most_tokens < 2 * LONGEST:
            raise ValueError(f"most_tokens must be at least {2 * LONGEST}, got {most_tokens}")
        self._most_tokens = most_tokens
        self._tokens = array("i")
        self._lowest = bytearray()
        self.num_added = 0

    def __len__(self) -> int:
        """Return the number of tokens that are kept."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens behind the text."""
        new = array("i", tokens)
        self._tokens.extend(new)
        self._lowest += _lowest_bytes(new)
        self.num_added += len(new)
        excess = len(self._tokens) - self._most_tokens
        if excess > 0:
            # Forget whole halves, so that a growing text is seldom copied.
            half = self._most_tokens // 2
            forgotten = -(-excess // half) * half
            del self._tokens[:forgotten], self._lowest[:forgotten]

    def find(self, newest: Sequence[int]) -> Match | None:
        """Return the last occurrence, in the text, of the longest suffix of `newest` that has one;
        None if its last SHORTEST tokens have none. Gives up after MOST_MISSES. newest: at least the
        newest LONGEST tokens, as far as there are so many."""
        tokens, wanted = self._tokens, array("i", newest[-LONGEST:])
        lowest = _lowest_bytes(wanted)
        # An n-gram counts once a token follows it.
        length, before, found, misses = SHORTEST, len(tokens) - 1, None, 0
        while length <= len(wanted) and before > 0 and misses < MOST_MISSES:
            first = self._lowest.rfind(lowest[-length:], 0, before)
            if first < 0:
                break
            # A longer occurrence of what is found here can only be an earlier one.
            before = first + length - 1
            if tokens[first : first + length] != wanted[-length:]:
                misses += 1
                continue
            while length < len(wanted) and first and tokens[first - 1] == wanted[-length - 1]:
                first, length = first - 1, length + 1
            found = Match(length, before)
            length += 1
        return found

    def newest(self, behind: Sequence[int]) -> list[int]:
        """Return the newest LONGEST tokens of the text with `behind` at its end."""
        missing = LONGEST - len(behind)
        return [*(self._tokens[-missing:] if missing > 0 else ()), *behind[-LONGEST:]]

    def following(self, match: Match, behind: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that followed an occurrence in the text with `behind` at its
        end, up to a separator. A run that repeats itself goes on beyond the end of the text."""
        found: list[int] = []
        for place in range(match.end + 1, match.end + 1 + most):
            after = place - len(self._tokens)
            if after < 0:
                token = self._tokens[place]
            elif after < len(behind):
                token = behind[after]
            else:
                token = found[after - len(behind)]
            if token == SEPARATOR:
                break
            found.append(token)
        return found


def _lowest_bytes(tokens: array[int]) -> bytes:
    return tokens.tobytes()[LOWEST::TOKEN_BYTES]
