"""For which sizes a verification is captured, and which of these one takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Products of a token more or less cost nearly the same as long as weights are read for longer than
# that, which on a Hopper device is up to about 200 tokens. Beyond, launches no longer matter.
TOKEN_COUNTS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 320)
# With five tokens more they take 6 and 19 % longer (cuBLAS, weights of 32B on an H200).
LAST_OF_TILES = (128, 160)


class VerifySize(NamedTuple):
    """Room of a captured verification: tokens of all requests together, and of any one of them."""

    num_tokens: int
    max_qo_len: int


def sizes_to_capture(
    max_rows: int, longest: int, query_counts: Iterable[int], num_piggyback: int = 0
) -> tuple[VerifySize, ...]:
    """Ascending by max_qo_len and then num_tokens; find_size() finds one among them for every
    verification of up to max_rows requests, with up to `longest` tokens each, that together with
    the longest possible one has no more than the last of TOKEN_COUNTS.

    query_counts: tokens of a request at which the attention's kernel changes; those that are not
    below `longest` by more than one count as `longest`.
    num_piggyback: rows of other requests in the same products.
    """
    fitting = {count - num_piggyback for count in LAST_OF_TILES if count > num_piggyback}
    counts = sorted(fitting.union(TOKEN_COUNTS))
    widest = sorted({count for count in query_counts if count < longest - 1} | {longest})
    sizes = []
    for max_qo_len in widest:
        below = 0
        for num_tokens in counts:
            # One size more than what requests of this length can have: they may not fill it.
            if num_tokens >= max_qo_len and below < max_rows * max_qo_len:
                sizes.append(VerifySize(num_tokens, max_qo_len))
            below = num_tokens
    return tuple(sizes)


def find_size(sizes: Sequence[VerifySize], lengths: Sequence[int]) -> VerifySize | None:
    """The first of `sizes`, ascending, for requests of these numbers of tokens; None where they
    have no room in any."""
    num_tokens, longest = sum(lengths), max(lengths)
    for size in sizes:
        # A kernel whose launch is fixed by both numbers counts on so many rows at most.
        num_rows = size.num_tokens - size.max_qo_len + 1
        if (
            size.max_qo_len >= longest
            and size.num_tokens >= num_tokens
            and num_rows >= len(lengths)
        ):
            return size
    return None
