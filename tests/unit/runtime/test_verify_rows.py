"""The content of VerifyRows after loading one plan after another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.kv.target_rows import target_rows
from sglang_kvspec.kv.transfers import send_into
from sglang_kvspec.runtime.verify_rows import VerifyRows

SIZE, MAX_ROWS, LONGEST, MAX_PAGES = 4, 3, 9, 8
MORE = -(-(LONGEST - 1) // SIZE)
CPU = torch.device("cpu")
plans = st.lists(
    st.tuples(st.integers(0, SIZE * MAX_PAGES - LONGEST), st.integers(1, LONGEST)),
    min_size=1,
    max_size=MAX_ROWS,
)


def plan_of(spans):
    rows = []
    for i, (start, length) in enumerate(spans):
        pages = torch.arange(-(-(start + length) // SIZE)) + 1 + i * MAX_PAGES
        rows.append(Row(RowKind.VERIFY, start, length, pages))
    return ForwardPlan(tuple(rows))


def make_rows():
    parts = MAX_ROWS * (1 + MORE)
    return VerifyRows(
        MAX_ROWS * LONGEST,
        MAX_ROWS,
        parts,
        max_pages=MAX_PAGES,
        max_past=parts * MAX_PAGES,
        max_tail=parts,
        max_encoded=MAX_ROWS * MORE,
        page_size=SIZE,
        device=CPU,
    )


def slot_of(page):
    return page + 100


@given(st.lists(plans, min_size=1, max_size=3), st.booleans())
def test_loaded_rows_replace_all_earlier_ones(history, split):
    rows = make_rows()
    for spans in history:
        plan = plan_of(spans)
        given_rows = target_rows(plan, SIZE, slot_of, split_by_page=split)
        count = plan.num_tokens
        tokens = list(range(1000, 1000 + count))
        positions = [p for row in plan.rows for p in range(row.start, row.end)]
        send_into(rows.values_of(given_rows, tokens, positions))
        assert rows.input_ids[:count].tolist() == tokens
        assert rows.positions[:count].tolist() == positions
        # Every token goes to its page, and no other entry writes.
        pages = [int(row.pages[p // SIZE]) for row in plan.rows for p in range(row.start, row.end)]
        assert rows.slots.tolist() == [slot_of(page) for page in pages] + [-1] * (
            rows.max_tokens - count
        )
        assert rows.offsets[:count].tolist() == [p % SIZE for p in positions]
        assert seen(rows) == wanted(plan, split)
        filled = [int(row.pages[i]) for row in plan.rows for i in row.written_pages(SIZE)[:-1]]
        encoded = filled if split else []
        assert [page for page in rows.encode_pages.tolist() if page != -1] == encoded
        sources = [slot for slot in rows.encode_source.tolist() if slot != -1]
        assert sources == [slot_of(page) for page in encoded]


def seen(rows):
    """Return (tokens, past pages, tail slots, tail tokens) of every part that has tokens."""
    parts = []
    for i in range(rows.max_parts):
        queries, past, tail = (
            part[i : i + 2].tolist()
            for part in (rows.qo_indptr, rows.past_indptr, rows.tail_indptr)
        )
        assert queries[0] <= queries[1]
        if queries[0] == queries[1]:
            assert past[0] == past[1]
            assert not rows.tail_lens[i]
            continue
        parts.append(
            (
                queries[1] - queries[0],
                rows.past_pages[slice(*past)].tolist(),
                rows.tail_slots[slice(*tail)].tolist(),
                int(rows.tail_lens[i]),
            )
        )
    return parts


def wanted(plan, split):
    parts = []
    for row in plan.rows:
        ids = row.pages.tolist()
        first, last = row.start // SIZE, (row.end - 1) // SIZE
        spans = [(first, row.start, row.end)]
        if split:
            spans = [
                (i, max(row.start, i * SIZE), min(row.end, (i + 1) * SIZE))
                for i in range(first, last + 1)
            ]
        for index, begin, end in spans:
            tail = [slot_of(page) for page in ids[index : (end - 1) // SIZE + 1]]
            parts.append((end - begin, ids[:index], tail, end - index * SIZE))
    return parts


def test_cleared_rows_have_no_part_and_write_nothing():
    rows = make_rows()
    plan = plan_of([(3, 6), (0, 1)])
    opened = target_rows(plan, SIZE, slot_of, split_by_page=True)
    send_into(rows.values_of(opened, [0] * 7, [0] * 7))
    rows.clear()
    assert seen(rows) == []
    assert {*rows.slots.tolist(), *rows.encode_pages.tolist(), *rows.encode_source.tolist()} == {-1}


def test_what_has_no_room_is_not_loaded():
    rows = make_rows()
    plan = plan_of([(0, LONGEST)] * (MAX_ROWS + 1))
    with pytest.raises(AssertionError, match="no captured CUDA graph"):
        rows.values_of(target_rows(plan, SIZE, slot_of, split_by_page=False), [], [])
