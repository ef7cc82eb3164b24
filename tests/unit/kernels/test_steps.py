"""The work of a captured step before and after the model, against the same in PyTorch."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.ops.steps import LEAST_LOGITS, MOST_ROWS, StepEnd, begin_step

PAGE = 4


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def test_tokens_go_behind_those_of_their_tails(device):
    # Rows in the first page, in the second, done, without a request, and done with all slots full.
    indptr = ints([0, 2, 4, 6, 6, 8], device)
    slots_of = ints([10, 11, 20, 21, 30, 31, 40, 41], device)
    lens = ints([2, 5, 3, 0, 8], device)
    limits = ints([4, 8, 3, 0, 8], device)
    slots, offsets = torch.full_like(lens, 7), torch.full_like(lens, 7)
    begin_step(indptr, slots_of, lens, limits, slots, offsets, PAGE)
    assert slots.tolist() == [10, 21, -1, -1, -1]
    assert offsets.tolist()[:2] == [2, 1]
    assert lens.tolist() == [3, 6, 3, 0, 8]


@pytest.mark.parametrize("batch", [0, 1, 3, MOST_ROWS + 5])
def test_many_rows(batch, device):
    rng = torch.Generator().manual_seed(batch)
    counts = torch.randint(0, 3, (batch,), generator=rng)
    indptr = torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(device)
    slots_of = torch.randperm(int(counts.sum()) + 1, generator=rng).int().to(device)
    limits = counts * PAGE
    lens = (torch.rand(batch, generator=rng) * (limits + 1)).int().minimum(limits)
    rows = [x.int().to(device) for x in (lens, limits, lens, lens)]
    begin_step(indptr, slots_of, rows[0].clone(), *rows[1:], PAGE)
    for b, (length, limit) in enumerate(zip(lens.tolist(), limits.tolist(), strict=True)):
        grows = length < limit
        wanted = int(slots_of[int(indptr[b]) + length // PAGE]) if grows else -1
        assert int(rows[2][b]) == wanted
        assert int(rows[3][b]) == length % PAGE


class Steps:
    """Rows of a batch. Memory behind them, for other rows, must not change."""

    def __init__(self, batch, device, max_steps=3):
        more = batch + 2
        self.batch = batch
        self.end = StepEnd(more, device)
        self.lens = torch.arange(more, dtype=torch.int32, device=device)
        self.limits = self.lens + (torch.arange(more, device=device) % 2).int()
        self.ids = torch.full((more,), -7, dtype=torch.int64, device=device)
        self.positions = torch.arange(more, device=device) * 10
        self.drafts = torch.full((max_steps, more), -7, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def take(self, logits):
        first = slice(self.batch)
        rows = (self.lens[first], self.limits[first], self.ids[first], self.positions[first])
        self.end(logits, *rows, self.drafts, self.step)


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("vocab", [5, 2 * LEAST_LOGITS + 1, 40 * LEAST_LOGITS - 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_comes_next(batch, vocab, dtype, device):
    """Among equal logits, of which bf16 has many, the first one wins, as in torch.argmax."""
    rows = Steps(batch, device)
    before = rows.positions.clone()
    every = []
    for step in range(2):
        rng = torch.Generator().manual_seed(step)
        logits = torch.randn((batch, vocab), generator=rng).to(dtype).to(device)
        rows.take(logits)
        every.append(logits.argmax(-1))
        assert torch.equal(rows.ids[:batch], every[-1])
        assert rows.step.tolist() == [step + 1]
    assert torch.equal(rows.drafts[:2, :batch], torch.stack(every))
    moved = 2 * (torch.arange(batch, device=device) % 2)
    assert torch.equal(rows.positions[:batch], before[:batch] + moved)
    # Memory behind the last row and step is unchanged.
    assert (rows.ids[batch:] == -7).all()
    assert (rows.drafts[2] == -7).all()
    assert (rows.drafts[:, batch:] == -7).all()
    assert torch.equal(rows.positions[batch:], before[batch:])


def test_more_rows_than_are_taken_at_a_time(device):
    batch = MOST_ROWS + 3
    rows = Steps(batch, device)
    logits = torch.randn((batch, 40), generator=torch.Generator().manual_seed(0)).to(device)
    rows.take(logits)
    assert torch.equal(rows.drafts[0, :batch], logits.argmax(-1))


@pytest.mark.parametrize("at", [0, LEAST_LOGITS - 1, LEAST_LOGITS, 3 * LEAST_LOGITS])
def test_ties_across_parts_and_logits_that_are_no_numbers(at, device):
    rows = Steps(4, device)
    logits = torch.full((4, 3 * LEAST_LOGITS + 1), -1.0, device=device)
    logits[0] = float("-inf")
    logits[1, at:] = 2.0
    logits[2, at] = float("inf")
    logits[3, at] = float("nan")
    rows.take(logits)
    assert rows.ids[:4].tolist() == [0, at, at, at]


def test_steps_that_there_is_no_room_for_leave_memory_alone(device):
    rows = Steps(2, device, max_steps=1)
    logits = torch.eye(2, 8, device=device)
    behind = rows.positions.clone()
    for _ in range(3):
        rows.take(logits)
    assert rows.drafts[:, :2].tolist() == [[0, 1]]
    assert torch.equal(rows.positions[2:], behind[2:])
    assert rows.step.tolist() == [3]


def test_logits_of_a_wider_tensor(device):
    rows = Steps(3, device)
    wide = torch.randn((3, 90), generator=torch.Generator().manual_seed(5)).to(device)
    rows.take(wide[:, :60])
    assert torch.equal(rows.ids[:3], wide[:, :60].argmax(-1))
