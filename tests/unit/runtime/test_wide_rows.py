"""WideRows: where the tokens of a draft step with several tokens of a request go."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows
from sglang_kvspec.runtime.wide_rows import WideRow, WideRows

SIZE, MOST = 32, 16
CPU = torch.device("cpu")


@pytest.fixture
def rows():
    return WideRows(DraftRows(4, 8, 8, SIZE, CPU), MOST)


def row(position, tail, tail_len, num_drafts=8):
    return DraftRow(1, position, torch.tensor([5]), tail, tail_len, num_drafts)


def test_tokens_are_the_last_rows_of_their_request(rows):
    # The second request crosses into the next page of its tail.
    first, second = row(40, [7], 8), row(94, [3, 9], 30)
    rows.load([WideRow(first, 2, [11, 12]), WideRow(second, 1, [21, 22, 23, 24])], 4)
    assert rows.input_ids.tolist() == [0, 0, 11, 12, 21, 22, 23, 24] + [0] * 8
    assert rows.positions.tolist() == [0, 0, 42, 43, 95, 96, 97, 98] + [0] * 8
    assert rows.slots.tolist() == [-1, -1, 7, 7, 3, 9, 9, 9] + [-1] * 8
    assert rows.offsets.tolist() == [0, 0, 10, 11, 31, 0, 1, 2] + [0] * 8
    # Tails end with the newest token.
    assert rows.tail_lens.tolist() == [12, 35, 0, 0]


def test_a_request_without_tokens_writes_nothing(rows):
    rows.load([WideRow(row(40, [7], 8), 3, []), WideRow(row(2, [3], 2), 0, [21])], 4)
    assert rows.slots.tolist() == [-1] * 7 + [3] + [-1] * 8
    assert rows.tail_lens.tolist() == [11, 3, 0, 0]


def test_the_next_load_clears_what_the_last_one_set(rows):
    rows.load([WideRow(row(40, [7], 8), 0, [11] * 16)], 16)
    rows.load([WideRow(row(40, [7], 8), 1, [12])], 4)
    assert rows.slots.tolist() == [-1, -1, -1, 7] + [-1] * 12
    rows.clear()
    assert rows.slots.tolist() == [-1] * MOST
    assert not rows.tail_lens.any()
    assert not rows.drafts.tail_indptr.any()


def test_a_step_leaves_the_most_likely_token_of_each_row(rows):
    rows.load([WideRow(row(40, [7], 8), 0, [11, 12])], 4)
    for likely in ([3, 49, 0, 17], [1, 2, 3, 4]):
        logits = torch.zeros(4, 50)
        logits[range(4), likely] = 1
        rows.begin_step(4)
        rows.end_step(logits)
        assert rows.top1[0, :4].tolist() == likely
    assert rows.positions[:4].tolist() == [0, 0, 40, 41]
