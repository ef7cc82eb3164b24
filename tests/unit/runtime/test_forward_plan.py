"""Rows of a forward, and the pages of a prefill that bypass the window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind, prefill_row

PAGE = 32
PAGES = torch.arange(100)


@pytest.mark.parametrize(
    ("start", "length", "recent_pages", "direct"),
    [
        # Exact multiples of a page: the newest full pages stay, and there is no partial page.
        (0, 4 * PAGE, 1, range(0, 3)),
        (0, 4 * PAGE, 2, range(0, 2)),
        (0, 4 * PAGE, 3, range(0, 1)),
        (0, 3 * PAGE, 3, range(0, 0)),
        # A partial last page stays, too.
        (0, 4 * PAGE + 1, 1, range(0, 3)),
        (0, 4 * PAGE - 1, 1, range(0, 2)),
        (0, 4 * PAGE - 1, 3, range(0, 0)),
        # Chunks that start within a page, which is in the window already.
        (5, 4 * PAGE, 1, range(1, 3)),
        (PAGE - 1, 1, 1, range(1, 1)),
        (PAGE - 1, 3 * PAGE + 1, 1, range(1, 3)),
        (PAGE - 1, 3 * PAGE + 1, 2, range(1, 2)),
        # Chunks behind a cached prefix of whole pages.
        (2 * PAGE, 3 * PAGE, 1, range(2, 4)),
        (2 * PAGE, 3 * PAGE, 3, range(2, 2)),
        # Chunks too short to fill a page.
        (0, 1, 1, range(0, 0)),
        (3, 4, 1, range(1, 1)),
        (2 * PAGE, PAGE - 1, 1, range(2, 2)),
        (2 * PAGE + 1, PAGE - 2, 3, range(3, 3)),
    ],
)
def test_pages_a_prefill_encodes_directly(start, length, recent_pages, direct):
    row = prefill_row(start, length, PAGES, page_size=PAGE, recent_pages=recent_pages)
    assert list(row.direct) == list(direct)
    assert (row.kind, row.start, row.length) == (RowKind.PREFILL, start, length)
    assert row.pages is PAGES


@given(
    start=st.integers(0, 500),
    length=st.integers(1, 500),
    page_size=st.sampled_from([32, 64]),
    recent_pages=st.integers(1, 3),
)
def test_direct_pages_are_written_whole_and_are_not_among_the_newest(
    start, length, page_size, recent_pages
):
    row = prefill_row(start, length, PAGES, page_size=page_size, recent_pages=recent_pages)
    num_full = row.end // page_size
    whole = {i for i in range(num_full) if i * page_size >= start}
    newest = set(range(num_full - recent_pages, num_full))
    assert set(row.direct) == whole - newest
    assert set(row.direct) <= set(row.written_pages(page_size))


@given(start=st.integers(0, 300), length=st.integers(1, 300), page_size=st.sampled_from([32, 64]))
def test_written_pages_are_those_of_its_positions(start, length, page_size):
    row = Row(RowKind.VERIFY, start, length, PAGES)
    assert row.end == start + length
    touched = {position // page_size for position in range(start, start + length)}
    assert set(row.written_pages(page_size)) == touched


def test_tokens_of_a_forward_are_those_of_its_rows():
    rows = [Row(RowKind.DRAFT, 7, 1, PAGES), Row(RowKind.VERIFY, 9, 5, PAGES)]
    assert ForwardPlan(tuple(rows)).num_tokens == 6
    assert ForwardPlan(()).num_tokens == 0
