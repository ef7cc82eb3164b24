"""Byte ranges, compared with one flag per byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.transport.ranges import ByteRanges

SIZE = 40
spans = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(
    lambda span: (span[0], min(SIZE, span[0] + span[1]))
)


@given(st.lists(spans, max_size=30))
def test_new_bytes_are_returned_once(pieces: list[tuple[int, int]]) -> None:
    ranges, flags = ByteRanges(SIZE), [False] * SIZE
    for start, stop in pieces:
        fresh = ranges.add(start, stop)
        told = [i for a, b in fresh for i in range(a, b)]
        assert told == [i for i in range(start, stop) if not flags[i]]
        flags[start:stop] = [True] * (stop - start)
        assert ranges.covered == sum(flags)
        assert ranges.is_full == all(flags)
    edges = sum(flags[i] and (i == 0 or not flags[i - 1]) for i in range(SIZE))
    assert len(ranges) == edges
