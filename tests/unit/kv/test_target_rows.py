"""Indices of a target forward, tested on memory in which every token records its origin.

A token is (request, position). Every test plays the forward as DeviceAttention does: fill, store,
keep, encode. Then it compares the tokens that each query sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind, prefill_row
from sglang_kvspec.kv.target_rows import TargetRows, indptr, target_rows

Token = tuple[int, int]
INT32 = (
    *("qo_indptr", "past_indptr", "past_pages", "tail_indptr", "tail_slots", "tail_lens"),
    *("encode_source", "encode_pages"),
)
INT64 = (
    *("token_slots", "token_offsets"),
    *("fill_scratch", "fill_window", "keep_scratch", "keep_window"),
)


@dataclass
class Forward:
    """Rows, the memory before them, and the indices of target_rows."""

    size: int
    split: bool
    rows: list[Row]
    slot_of_page: dict[int, int]
    window: dict[Token, Token] = field(default_factory=dict)
    records: dict[int, list[Token]] = field(default_factory=dict)

    def indices(self) -> TargetRows:
        return target_rows(
            ForwardPlan(tuple(self.rows)),
            self.size,
            self.slot_of_page.__getitem__,
            split_by_page=self.split,
        )

    def remember(self) -> None:
        """Set the memory before the forward: whole pages are encoded, the tokens of a begun page
        lie in the window, and all other memory is undefined."""
        for request, row in enumerate(self.rows):
            begun = row.start // self.size
            for index, page in enumerate(row.pages[:begun].tolist()):
                self.records[page] = self.tokens_of(request, index)
            for position in range(begun * self.size, row.start):
                slot = self.slot_of_page[int(row.pages[begun])]
                self.window[slot, position % self.size] = (request, position)

    def tokens_of(self, request: int, index: int) -> list[Token]:
        return [(request, index * self.size + offset) for offset in range(self.size)]

    def run(self, rows: TargetRows) -> dict[Token, Token]:
        """Play fill, store, keep and encode. Return the tail pool."""
        pool = {} if rows.num_scratch else self.window

        def copy(from_pool, from_slot, to_pool, to_slot):
            for offset in range(self.size):
                if (from_slot, offset) in from_pool:
                    to_pool[to_slot, offset] = from_pool[from_slot, offset]

        for scratch, slot in pairs(rows.fill_scratch, rows.fill_window):
            copy(self.window, slot, pool, scratch)
        for token, place in zip(self.new, pairs(rows.token_slots, rows.token_offsets), strict=True):
            pool[place] = token
        for scratch, slot in pairs(rows.keep_scratch, rows.keep_window):
            copy(pool, scratch, self.window, slot)
        for source, page in pairs(rows.encode_source, rows.encode_pages):
            self.records[page] = [pool[source, offset] for offset in range(self.size)]
        return pool

    @property
    def new(self) -> list[Token]:
        return [(i, p) for i, row in enumerate(self.rows) for p in range(row.start, row.end)]


def pairs(*columns: torch.Tensor):
    return list(zip(*(column.tolist() for column in columns), strict=True))


@st.composite
def forwards(draw: st.DrawFn) -> Forward:
    kind = draw(st.sampled_from([RowKind.PREFILL, RowKind.VERIFY, RowKind.REPEAT]))
    size = draw(st.sampled_from([4, 16]))
    recent_pages = draw(st.integers(1, 3))
    num_rows = draw(st.integers(1, 4))
    extents = [
        (draw(st.integers(0, 5 * size)), draw(st.integers(1, 4 * size))) for _ in range(num_rows)
    ]
    counts = [-(-(start + length) // size) for start, length in extents]
    pages = iter(draw(st.permutations(range(1, sum(counts) + 1))))
    rows = []
    for (start, length), count in zip(extents, counts, strict=True):
        # A repeat has pages up to its start only.
        last = -(-start // size) if kind is RowKind.REPEAT else count
        ids = torch.tensor([next(pages) for _ in range(count)][:last], dtype=torch.int64)
        if kind is RowKind.PREFILL:
            row = prefill_row(start, length, ids, page_size=size, recent_pages=recent_pages)
        else:
            row = Row(kind, start, length, ids)
        rows.append(row)
    # Only opened pages have a window slot. Looking up another page is an error.
    opened = [
        int(row.pages[index])
        for row in rows
        for index in row.written_pages(size)
        if index not in row.direct
    ]
    begun = [row for row in rows if kind is RowKind.REPEAT and row.start % size]
    opened += [int(row.pages[row.start // size]) for row in begun]
    slots = dict(zip(opened, draw(st.permutations(range(len(opened) + 2))), strict=False))
    return Forward(size, draw(st.booleans()) and kind is not RowKind.REPEAT, rows, slots)


def run_of(indptr_, values, part):
    return values[int(indptr_[part]) : int(indptr_[part + 1])].tolist()


@settings(max_examples=150)
@given(forward=forwards())
def test_every_query_sees_its_request_up_to_itself_once(forward):
    forward.remember()
    rows = forward.indices()
    pool = forward.run(rows)
    parts = torch.arange(len(rows.tail_lens)).repeat_interleave(rows.qo_indptr.diff()).tolist()
    for query, (part, own) in enumerate(zip(parts, forward.new, strict=True)):
        past = run_of(rows.past_indptr, rows.past_pages, part)
        tail = run_of(rows.tail_indptr, rows.tail_slots, part)
        tail_len = int(rows.tail_lens[part]) - (int(rows.qo_indptr[part + 1]) - 1 - query)
        seen = [token for page in past for token in forward.records[page]]
        seen += [pool[tail[t // forward.size], t % forward.size] for t in range(tail_len)]
        assert seen == [(own[0], position) for position in range(own[1] + 1)]


@settings(max_examples=150)
@given(forward=forwards())
def test_full_precision_covers_the_own_row_or_with_int8_the_own_page(forward):
    rows, size = forward.indices(), forward.size
    part = 0
    for row in forward.rows:
        held = row.held_pages(size)
        parts = list(held) if forward.split else [held.start]
        for first in parts:
            past = run_of(rows.past_indptr, rows.past_pages, part)
            assert past == row.pages[:first].tolist()
            num_tail = 1 if forward.split else len(held)
            assert len(run_of(rows.tail_indptr, rows.tail_slots, part)) == num_tail
            assert size * (num_tail - 1) < int(rows.tail_lens[part]) <= size * num_tail
            part += 1
    assert part == len(rows.tail_lens)
    assert rows.max_qo_len == int(rows.qo_indptr.diff().max())


@settings(max_examples=150)
@given(forward=forwards())
def test_exactly_the_pages_that_need_records_are_encoded(forward):
    """Each page of this forward's tokens that needs records is encoded once: direct pages and, with
    int8, pages that later queries of the same row read."""
    forward.remember()
    rows = forward.indices()
    forward.run(rows)
    wanted = {}
    for request, row in enumerate(forward.rows):
        written = row.written_pages(forward.size)
        for index in written:
            if index in row.direct or (forward.split and index + 1 in written):
                wanted[int(row.pages[index])] = forward.tokens_of(request, index)
    encoded = rows.encode_pages.tolist()
    assert sorted(encoded) == sorted(wanted)
    assert {page: forward.records[page] for page in encoded} == wanted
    assert {int(page) for page in rows.past_pages} <= forward.records.keys()


@settings(max_examples=150)
@given(forward=forwards())
def test_the_window_then_holds_every_open_page(forward):
    forward.remember()
    forward.run(forward.indices())
    # A repeat leaves the page as it was.
    wanted = {
        (forward.slot_of_page[int(row.pages[p // forward.size])], p % forward.size): (request, p)
        for request, row in enumerate(forward.rows)
        for p in range(
            row.start // forward.size * forward.size,
            row.start if row.kind is RowKind.REPEAT else row.end,
        )
        if p // forward.size not in row.direct
    }
    assert forward.window == wanted


@settings(max_examples=100)
@given(forward=forwards())
def test_tensors_are_what_kernels_take(forward):
    rows = forward.indices()
    for names, dtype in ((INT32, torch.int32), (INT64, torch.int64)):
        for name in names:
            tensor = getattr(rows, name)
            assert (tensor.dtype, tensor.dim()) == (dtype, 1), name
            assert tensor.is_contiguous(), name
    for offsets, values in (
        (rows.qo_indptr, rows.token_slots),
        (rows.past_indptr, rows.past_pages),
        (rows.tail_indptr, rows.tail_slots),
    ):
        assert int(offsets[0]) == 0
        assert bool((offsets.diff() >= 0).all())
        assert int(offsets[-1]) == len(values)
        assert len(offsets) == len(rows.tail_lens) + 1


@given(forward=forwards())
def test_prefill_rows_share_no_scratch_page_and_verify_rows_need_none(forward):
    rows = forward.indices()
    if forward.rows[0].kind is RowKind.VERIFY:
        assert rows.num_scratch == len(rows.fill_scratch) == len(rows.keep_scratch) == 0
        return
    assert sorted(rows.tail_slots.tolist()) == list(range(rows.num_scratch))
    assert len(rows.fill_scratch) == sum(row.start % forward.size > 0 for row in forward.rows)


def test_a_prefill_by_hand():
    """Compute tokens 6 .. 20 in pages of 4, of which pages 2 and 3 bypass the window."""
    row = prefill_row(6, 15, torch.arange(10, 16), page_size=4, recent_pages=1)
    slots = {11: 3, 14: 0, 15: 1}
    rows = target_rows(ForwardPlan((row,)), 4, slots.__getitem__, split_by_page=False)
    assert rows.token_slots.tolist() == [0] * 2 + [1] * 4 + [2] * 4 + [3] * 4 + [4]
    assert rows.token_offsets.tolist() == [2, 3, *[0, 1, 2, 3] * 3, 0]
    assert (rows.fill_scratch.tolist(), rows.fill_window.tolist()) == ([0], [3])
    assert (rows.keep_scratch.tolist(), rows.keep_window.tolist()) == ([0, 3, 4], [3, 0, 1])
    assert (rows.encode_source.tolist(), rows.encode_pages.tolist()) == ([1, 2], [12, 13])
    assert (rows.past_pages.tolist(), rows.tail_lens.tolist()) == ([10], [17])


def test_a_repeat_by_hand():
    """Run 5 tokens behind 6 of a request, in pages of 4."""
    row = Row(RowKind.REPEAT, 6, 5, torch.tensor([10, 11]))
    rows = target_rows(ForwardPlan((row,)), 4, {11: 3}.__getitem__, split_by_page=False)
    assert rows.token_slots.tolist() == [0, 0, 1, 1, 1]
    assert rows.token_offsets.tolist() == [2, 3, 0, 1, 2]
    assert (rows.fill_scratch.tolist(), rows.fill_window.tolist()) == ([0], [3])
    assert len(rows.keep_scratch) == len(rows.encode_source) == 0
    assert (rows.past_pages.tolist(), rows.tail_slots.tolist()) == ([10], [0, 1])
    assert rows.tail_lens.tolist() == [7]
    with pytest.raises(AssertionError, match="cannot be split"):
        target_rows(ForwardPlan((row,)), 4, {11: 3}.__getitem__, split_by_page=True)


@pytest.mark.parametrize("split", [False, True])
def test_the_last_slot_a_forward_fills_is_not_encoded_while_verified(split):
    """The slot may hold drafts that are rejected, and its record is not read."""
    row = Row(RowKind.VERIFY, 7, 9, torch.arange(1, 5))
    rows = target_rows(ForwardPlan((row,)), 4, lambda page: page + 5, split_by_page=split)
    assert rows.encode_pages.tolist() == ([2, 3] if split else [])
    assert rows.encode_source.tolist() == ([7, 8] if split else [])


def test_offsets_of_runs():
    assert indptr([]).tolist() == [0]
    assert indptr([0, 3, 0, 2]).tolist() == [0, 0, 3, 3, 5]
    assert indptr(iter([1])).dtype == torch.int32
