"""Rounds of draft steps over fixed tensors, compared with requests that are lists of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows
from sglang_kvspec.runtime.head_lists import HeadLists

CPU = torch.device("cpu")
SIZE, MAX_BATCH, MAX_STEPS, MAX_PAGES, VOCAB = 4, 5, 9, 8, 97
# Content of entries that were never loaded, or belong to no request.
GARBAGE = 77_777


def next_token(token: int, position: int) -> int:
    """Return the token that the model of every test gives after a token at a position."""
    return (31 * token + 7 * position + 5) % VOCAB


@dataclass
class Chain:
    """A row and the tokens that it will draft. inputs[s] is the input of step s."""

    row: DraftRow
    inputs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs = [self.row.token]
        for step in range(MAX_STEPS):
            self.inputs.append(next_token(self.inputs[-1], self.row.position + step))

    @property
    def tail_start(self) -> int:
        return self.row.position - self.row.tail_len


def make_rows() -> DraftRows:
    return DraftRows(MAX_BATCH, MAX_STEPS, MAX_PAGES, SIZE, CPU)


@st.composite
def rounds(draw: st.DrawFn) -> list[DraftRow]:
    """Draw up to MAX_BATCH requests with distinct window slots, those with more drafts first."""
    slots = iter(draw(st.permutations(range(60))))
    rows = []
    lens = draw(st.lists(st.integers(1, MAX_STEPS), max_size=MAX_BATCH))
    for num_drafts in sorted(lens, reverse=True):
        past = draw(st.lists(st.integers(1, 500), max_size=4))
        tail_len = draw(st.integers(0, 2 * SIZE))
        spare = draw(st.integers(0, 1))
        num_tail = -(-(tail_len + num_drafts) // SIZE) + spare
        rows.append(
            DraftRow(
                token=draw(st.integers(0, VOCAB - 1)),
                position=len(past) * SIZE + tail_len,
                past=torch.tensor(past, dtype=torch.int64),
                tail=[next(slots) for _ in range(num_tail)],
                tail_len=tail_len,
                num_drafts=num_drafts,
            )
        )
    return rows


def run_of(indptr, values, row):
    return values[int(indptr[row]) : int(indptr[row + 1])].tolist()


def play(rows: DraftRows, loaded: list[DraftRow], batch_of) -> None:
    """Load and run a whole round, and check every step. batch_of(going): number of rows that take
    part."""
    rows.load(loaded)
    chains = [Chain(row) for row in loaded]
    # (slot, offset) -> position, for tokens from before the round and tokens that the round stores.
    memory = {
        (row.tail[t // SIZE], t % SIZE): chain.tail_start + t
        for row, chain in zip(loaded, chains, strict=True)
        for t in range(row.tail_len)
    }
    for step in range(max((row.num_drafts for row in loaded), default=1)):
        batch = batch_of(sum(row.num_drafts > step for row in loaded))
        before = rows.positions.clone()
        rows.begin_step(batch)
        for b, chain in enumerate(chains[:batch]):
            check_row(rows, b, chain, step, memory)
        for b in range(len(loaded), batch):
            assert (int(rows.slots[b]), int(rows.tail_lens[b])) == (-1, 0)
            assert not run_of(rows.past_indptr, rows.past_pages, b)
            assert not run_of(rows.tail_indptr, rows.tail_slots, b)
        rows.end_step(logits_of(rows, batch))
        # A row that has stored its last token does not advance, since the next position may not
        # exist.
        ends = [
            row.position + max(row.num_drafts - 1, 0) if b < len(loaded) else 0
            for b, row in enumerate([*loaded, *[None] * batch][:batch])
        ]
        assert rows.positions[:batch].tolist() == [
            min(int(was) + 1, end) for was, end in zip(before[:batch], ends, strict=True)
        ]
        assert torch.equal(rows.positions[batch:], before[batch:])
        assert int(rows.step) == step + 1
    for b, chain in enumerate(chains):
        count = chain.row.num_drafts
        assert rows.drafts[:count, b].tolist() == chain.inputs[1 : count + 1]


def check_row(rows, b, chain, step, memory):
    """Check the token, place and view of a row in one step, and store the token."""
    row = chain.row
    assert run_of(rows.past_indptr, rows.past_pages, b) == row.past.tolist()
    assert run_of(rows.tail_indptr, rows.tail_slots, b) == list(row.tail)
    if step >= row.num_drafts:
        assert int(rows.slots[b]) == -1
        assert int(rows.tail_lens[b]) == row.tail_len + row.num_drafts
        return
    assert int(rows.input_ids[b]) == chain.inputs[step]
    assert int(rows.positions[b]) == row.position + step
    place = int(rows.slots[b]), int(rows.offsets[b])
    assert place not in memory, "a token was stored over another"
    memory[place] = row.position + step
    tail_len = int(rows.tail_lens[b])
    seen = [memory[row.tail[t // SIZE], t % SIZE] for t in range(tail_len)]
    assert seen == list(range(chain.tail_start, row.position + step + 1))


def logits_of(rows: DraftRows, batch: int) -> torch.Tensor:
    logits = torch.zeros((batch, VOCAB))
    for b in range(batch):
        logits[b, next_token(int(rows.input_ids[b]), int(rows.positions[b]))] = 1.0
    return logits


@settings(max_examples=30)
@given(loaded=rounds(), sizes=st.sampled_from(["just", "padded", "all"]))
def test_steps_store_see_and_chain_tokens_as_lists_do(loaded, sizes):
    batch_of = {
        "just": lambda going: going,
        "padded": lambda going: min(MAX_BATCH, -(-going // 2) * 2),
        "all": lambda going: MAX_BATCH,
    }[sizes]
    play(make_rows(), loaded, batch_of)


@settings(max_examples=15)
@given(loads=st.lists(rounds(), min_size=2, max_size=3))
def test_a_round_leaves_nothing_behind_for_the_next(loads):
    rows = make_rows()
    addresses = [t.data_ptr() for t in vars(rows).values() if isinstance(t, torch.Tensor)]
    for loaded in loads:
        play(rows, loaded, lambda going: MAX_BATCH)
    now = [t.data_ptr() for t in vars(rows).values() if isinstance(t, torch.Tensor)]
    assert now == addresses, "a captured graph reads the old tensors"


def test_order_need_not_be_by_drafts_where_all_rows_step():
    loaded = [
        DraftRow(1, 6, torch.tensor([9]), [3, 4], 2, num_drafts=1),
        DraftRow(2, 0, torch.tensor([], dtype=torch.int64), [5, 8, 0], 0, num_drafts=9),
        DraftRow(3, 3, torch.tensor([], dtype=torch.int64), [7, 1], 3, num_drafts=4),
    ]
    play(make_rows(), loaded, lambda going: MAX_BATCH)


def test_no_rows_may_be_loaded_after_some():
    rows = make_rows()
    rows.load([DraftRow(1, 6, torch.tensor([9]), [3, 4], 2, num_drafts=3)])
    rows.begin_step(1)
    rows.load([])
    for _ in range(MAX_STEPS):
        rows.begin_step(MAX_BATCH)
        assert rows.slots.tolist() == [-1] * MAX_BATCH
        assert rows.tail_lens.tolist() == [0] * MAX_BATCH
        rows.end_step(torch.zeros((MAX_BATCH, VOCAB)))
    assert not rows.past_indptr.any()
    assert not rows.tail_indptr.any()


def test_rows_beyond_the_batch_are_left_alone():
    rows = make_rows()
    rows.load([DraftRow(t, 0, torch.tensor([8]), [2 * t, 2 * t + 1], 1, 5) for t in range(3)])
    rows.slots.fill_(GARBAGE)
    rows.begin_step(2)
    rows.end_step(torch.eye(2, VOCAB))
    assert rows.slots.tolist() == [0, 2] + [GARBAGE] * (MAX_BATCH - 2)
    assert rows.tail_lens.tolist() == [2, 2, 1, 0, 0]
    assert rows.input_ids.tolist() == [0, 1, 2, 0, 0]


def test_overridden_tokens_are_the_next_inputs():
    rows = make_rows()
    rows.load([DraftRow(t, 0, torch.tensor([8]), [2 * t, 2 * t + 1], 1, 5) for t in range(3)])
    rows.begin_step(3)
    rows.end_step(torch.eye(3, VOCAB))
    rows.override([50, 60])
    assert rows.input_ids.tolist() == [50, 60, 2, 0, 0]
    assert rows.positions.tolist() == [1, 1, 1, 0, 0]
    rows.override([])
    assert rows.input_ids.tolist() == [50, 60, 2, 0, 0]


def test_page_ids_are_carried_exactly():
    """A pool may have more pages than fp32 has exact integers."""
    rows = make_rows()
    pages = torch.tensor([2**24 + 1, 2**30 + 3])
    rows.load([DraftRow(1, 8, pages, [2**24 + 5], 0, num_drafts=1)])
    assert rows.past_pages[:2].tolist() == pages.tolist()
    assert int(rows.tail_slots[0]) == 2**24 + 5


def test_a_tail_that_is_full_may_end_where_all_tails_end():
    rows = make_rows()
    most = len(rows.tail_slots)
    none = torch.tensor([], dtype=torch.int64)
    rows.load([DraftRow(1, most * SIZE - 1, none, range(most), most * SIZE - 1, num_drafts=1)])
    rows.begin_step(1)
    assert (int(rows.slots[0]), int(rows.offsets[0])) == (most - 1, SIZE - 1)
    rows.begin_step(MAX_BATCH)
    assert rows.slots.tolist() == [-1] * MAX_BATCH
    assert rows.tail_lens.tolist() == [most * SIZE, 0, 0, 0, 0]


def test_a_batch_with_more_pages_than_promised_is_refused():
    rows = make_rows()
    too_many = torch.arange(MAX_BATCH * MAX_PAGES + 1)
    with pytest.raises(AssertionError, match="more pages"):
        rows.load([DraftRow(1, 0, too_many, [0], 0, 1)])
    with pytest.raises(AssertionError, match="more window pages"):
        rows.load([DraftRow(1, 0, torch.tensor([1]), range(10_000), 0, 1)])


def test_lists_of_layers_and_heads_follow_one_another():
    rows = DraftRows(MAX_BATCH, MAX_STEPS, MAX_PAGES, SIZE, CPU, lists=HeadLists(2, 3, CPU))
    address = rows.head_pages.data_ptr()
    differing = torch.arange(12).view(2, 2, 3)
    loaded = [
        DraftRow(1, 9, differing, [0], 1, num_drafts=1),
        DraftRow(1, 13, torch.tensor([40, 41, 42]), [1], 1, num_drafts=1),
    ]
    rows.past_pages.fill_(GARBAGE)
    rows.load(loaded)
    assert rows.list_indptr.tolist() == [0, 2, 5, 5, 5, 5]
    assert torch.equal(rows.head_pages[:2], differing.int())
    assert [part.unique().tolist() for part in rows.head_pages[2:5]] == [[40], [41], [42]]
    assert (rows.past_pages == GARBAGE).all()
    # Steps at the target precision read one list for all layers and heads.
    rows.load(loaded[1:], at_target=True)
    assert rows.past_pages[:3].tolist() == [40, 41, 42]
    assert torch.equal(rows.head_pages[:2], differing.int())
    assert rows.head_pages.data_ptr() == address, "a captured graph reads the old tensor"


def test_the_device_is_told_what_to_select_by_mass():
    rows = DraftRows(
        MAX_BATCH, MAX_STEPS, MAX_PAGES, SIZE, CPU, lists=HeadLists(2, 3, CPU), by_mass=True
    )
    past = torch.tensor([40, 41, 42])
    choosing = {"num_read": 2, "num_newest": 1, "slot": 7}
    loaded = [
        DraftRow(1, 13, past, [1], 1, num_drafts=1, **choosing),
        DraftRow(1, 9, past[:2], [0], 1, num_drafts=1, slot=3),
    ]
    rows.head_pages.fill_(GARBAGE)
    rows.load(loaded)
    assert rows.past_pages[:5].tolist() == [40, 41, 42, 40, 41]
    assert rows.past_indptr[:4].tolist() == [0, 3, 5, 5]
    assert rows.list_indptr[:4].tolist() == [0, 2, 4, 4]
    assert rows.mass_slots[:3].tolist() == [7, 3, 0]
    assert rows.num_newest[:3].tolist() == [1, 0, 0]
    assert (rows.head_pages == GARBAGE).all()
    rows.load(loaded[1:], at_target=True)
    assert rows.past_indptr[:3].tolist() == [0, 2, 2]
