"""Sizes for which verifications are captured, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Token counts to capture. Up to about 200 tokens on a Hopper device, reading weights takes longer
# than multiplying by them, so a few more tokens cost little. Beyond that, launches do not matter.
TOKEN_COUNTS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 320)
# Most tokens of a cuBLAS tile: five tokens more take 6 and 19 % longer (weights of 32B on an H200).
LAST_OF_TILES = (128, 160)


class VerifySize(NamedTuple):
    """Room of a captured verification: tokens of all requests together, and most tokens of one of
    them."""

    num_tokens: int
    max_qo_len: int


def sizes_to_capture(
    max_rows: int, longest: int, query_counts: Iterable[int], num_piggyback: int = 0
) -> tuple[VerifySize, ...]:
    """Return the sizes to capture, ascending by max_qo_len and then num_tokens.

    find_size() finds one of them for every verification of up to max_rows requests, with up to
    `longest` tokens each. This holds if the verification's tokens plus `longest` are at most the
    last of TOKEN_COUNTS.

    query_counts: tokens of a request at which the attention's kernel changes; counts from `longest`
    - 1 on count as `longest`. num_piggyback: rows of other requests in the same products.
    """
    fitting = {count - num_piggyback for count in LAST_OF_TILES if count > num_piggyback}
    counts = sorted(fitting.union(TOKEN_COUNTS))
    widest = sorted({count for count in query_counts if count < longest - 1} | {longest})
    sizes = []
    for max_qo_len in widest:
        below = 0
        for num_tokens in counts:
            # Include the first size at or above the most tokens that requests of this length can
            # have.
            if num_tokens >= max_qo_len and below < max_rows * max_qo_len:
                sizes.append(VerifySize(num_tokens, max_qo_len))
            below = num_tokens
    return tuple(sizes)


def find_size(sizes: Sequence[VerifySize], lengths: Sequence[int]) -> VerifySize | None:
    """Return the first of `sizes`, ascending, with room for requests of these numbers of tokens;
    None if no size has room."""
    num_tokens, longest = sum(lengths), max(lengths)
    for size in sizes:
        # A launch that both numbers fix has room for at most this many rows.
        num_rows = size.num_tokens - size.max_qo_len + 1
        if (
            size.max_qo_len >= longest
            and size.num_tokens >= num_tokens
            and num_rows >= len(lengths)
        ):
            return size
    return None
