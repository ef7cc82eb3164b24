"""Index of the n-grams of a growing text: what followed its newest tokens when they came last."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Lengths of n-grams. One token has too many followers. More than six tells occurrences apart that
# six do not, which is rare, and costs as much as each of the others.
SHORTEST, LONGEST = 2, 6
# Tokens that an index keeps: 21 MB at most, at 0.3 KB a token.
MOST_TOKENS = 65_536
TOKEN_BITS = 32
# Separates the texts of several requests. No model has this token.
SEPARATOR = -1
# Added to a token in a key, so that no digit of a key is 0 and n-grams of all lengths differ.
ABOVE_ZERO = 1 - SEPARATOR


class Match(NamedTuple):
    """Occurrence of the newest tokens. length: how many of them occurred. end: index of the last
    one among the kept tokens; another token follows it."""

    length: int
    end: int


class NgramIndex:
    """Index of all n-grams of SHORTEST to LONGEST tokens of one text.

    Tokens are added and never rolled back: drafts, which may be, are passed to find() instead.
    Above most_tokens, the index forgets its older half. So a token costs O(LONGEST) on average, and
    memory is bounded. Equal calls give equal results, so ranks agree without a message.

    SGLang's NgramCorpus holds the text of all requests in one trie. A request would be proposed the
    text of another, which its timing could reveal. The trie also needs a C++ compiler at the start.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        if most_tokens < 2 * LONGEST:
            raise ValueError(f"most_tokens must be at least {2 * LONGEST}, got {most_tokens}")
        self._most_tokens = most_tokens
        self._tokens = array("i")
        # By n-gram, the index of its last token where it occurred last, before the newest token.
        self._ends: dict[int, int] = {}
        self.num_added = 0

    def __len__(self) -> int:
        """Return the number of tokens that are kept."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens behind the text."""
        for token in tokens:
            # An n-gram counts once a token follows it.
            self._note_ends_at(len(self._tokens) - 1)
            self._tokens.append(token)
            self.num_added += 1
            if len(self._tokens) > self._most_tokens:
                self._forget_half()

    def _note_ends_at(self, end: int) -> None:
        key = 0
        for length in range(1, min(LONGEST, end + 1) + 1):
            key = key << TOKEN_BITS | (self._tokens[end - length + 1] + ABOVE_ZERO)
            if length >= SHORTEST:
                self._ends[key] = end

    def _forget_half(self) -> None:
        self._tokens = self._tokens[self._most_tokens // 2 :]
        self._ends.clear()
        for end in range(len(self._tokens) - 1):
            self._note_ends_at(end)

    def find(self, newest: Sequence[int]) -> Match | None:
        """Return the last occurrence, in the text, of the longest suffix of `newest` that has one;
        None if its last SHORTEST tokens have none. newest: at least the newest LONGEST tokens, as
        far as there are so many."""
        key, found = 0, None
        for length, token in enumerate(reversed(newest[-LONGEST:]), start=1):
            key = key << TOKEN_BITS | (token + ABOVE_ZERO)
            if length < SHORTEST:
                continue
            end = self._ends.get(key)
            if end is None:
                # Nor has any longer suffix an occurrence.
                break
            found = Match(length, end)
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
