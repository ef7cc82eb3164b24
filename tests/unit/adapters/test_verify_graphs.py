"""VerifyGraphs over forwards that are not captured: what a replay finds, and what is left to it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters import verify_graphs
from sglang_kvspec.runtime.beside_rows import BesideDraft
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind

SIZE, MAX_ROWS, MAX_DRAFTS, VOCAB, MAX_BESIDE = 64, 2, 8, 7, 3


class FakeForward:
    """A replay's logits say which token was where: logits[t] = (input id, position, 0, ...)."""

    def __init__(self):
        self.logits = torch.zeros(256, VOCAB)
        self.captured, self.replayed = [], []

    def capture(self, rows, num_tokens, stream, warm_ups):
        size = len(self.captured)
        self.captured.append(num_tokens)

        def replay():
            self.replayed.append(size)
            self.logits[:] = -1
            self.logits[:num_tokens, 0] = rows.input_ids[:num_tokens].float()
            self.logits[:num_tokens, 1] = rows.positions[:num_tokens].float()
            rows.begin_step(num_tokens)
            rows.end_step(self.logits[:num_tokens])

        return SimpleNamespace(replay=replay)


@pytest.fixture
def forward():
    return FakeForward()


@pytest.fixture
def graphs(make_device_kv, monkeypatch, forward):
    monkeypatch.setattr(
        verify_graphs, "graph_capture", lambda: nullcontext(SimpleNamespace(stream=None))
    )
    kv = make_device_kv(page_size=SIZE, target="int8")
    attention = DeviceAttention(kv, num_qo_heads=2 * kv.geometry.num_kv_heads)
    runner = SimpleNamespace(
        max_running_requests=MAX_ROWS,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(MAX_ROWS, 4 * SIZE)),
    )
    sizes = verify_graphs.sizes_of(runner, attention, MAX_DRAFTS, MAX_BESIDE)
    return verify_graphs.VerifyGraphs(runner, forward, attention, MAX_DRAFTS, sizes, MAX_BESIDE)


def plan_of(*spans):
    """(start, length, pages) of each row."""
    return ForwardPlan(
        tuple(Row(RowKind.VERIFY, *span[:2], torch.tensor(span[2])) for span in spans)
    )


def run(graphs, plan, tokens, drafted=None, firsts=(), beside=()):
    positions = [p for row in plan.rows for p in range(row.start, row.end)]
    firsts = firsts or [-1] * len(plan.rows)
    return graphs.run(plan, tokens, positions, drafted, firsts, beside)


def test_logits_are_those_of_the_rows_tokens(graphs):
    # Pages 3 and 4 are the first request's, of which it fills the first on the way.
    plan = plan_of((62, 4, [3, 4]), (5, 2, [7]))
    logits, _ = run(graphs, plan, [10, 11, 12, 13, 20, 21])
    assert logits[:, 0].tolist() == [10, 11, 12, 13, 20, 21]
    assert logits[:, 1].tolist() == [62, 63, 64, 65, 5, 6]
    window = graphs._attention.kv.window.slots
    assert set(window) == {3, 4, 7}
    # The next forward may begin.
    run(graphs, plan_of((6, 1, [7])), [30])


def test_drafts_that_are_only_on_the_device_are_verified(graphs):
    drafted = DraftedTokens(torch.tensor([[50, 60], [51, 0]]), order=[1, 0], lens=[1, 2])
    plan = plan_of((3, 2, [5]), (9, 3, [6]))
    # The first request is the second column; both begin with their pending tokens.
    logits, _ = run(graphs, plan, [1, 0, 2, 0, 0], drafted, firsts=[1, 3])
    assert logits[:, 0].tolist() == [1, 60, 2, 50, 51]


def test_what_has_no_room_is_left_alone(graphs, forward):
    graphs.sizes = [size for size in graphs.sizes if size.max_qo_len < MAX_DRAFTS + 1]
    plan = plan_of((3, MAX_DRAFTS + 1, [5]))
    assert run(graphs, plan, list(range(MAX_DRAFTS + 1))) is None
    assert not forward.replayed
    assert not list(graphs._attention.kv.window.slots)
    # Nothing was begun that would have to be finished.
    graphs._attention.open(plan)


def test_large_forwards_are_captured_first(graphs, forward):
    alone, beside = forward.captured[::2], forward.captured[1::2]
    assert len(alone) == len(graphs.sizes)
    assert alone == sorted(alone, reverse=True)
    assert beside == [MAX_BESIDE + num_tokens for num_tokens in alone]


def beside(index, token, start, pages):
    return BesideDraft(index, token, Row(RowKind.DRAFT, start, 1, torch.tensor(pages)))


def test_others_draft_in_the_same_forward(graphs):
    """0 and 3 verify; 1 drafts behind a draft of this round, 2 behind its pending token."""
    drafted = DraftedTokens(torch.tensor([[50, 60], [51, 0]]), order=[1, 3], lens=[0, 2, 0, 1])
    plan = plan_of((3, 1, [5]), (9, 2, [6]))
    others = [beside(1, 0, 2 * SIZE, [8, 9, 10]), beside(2, 4, 7, [11])]
    firsts = [1, -1, -1, 2]
    logits, more = run(graphs, plan, [1, 2, 0], drafted, firsts, others)
    assert logits[:, :2].tolist() == [[1, 3], [2, 9], [60, 10]]
    rows = graphs._beside.drafts
    assert rows.input_ids.shape == (MAX_BESIDE,)
    assert graphs._forward.logits[:2, :2].tolist() == [[51, 2 * SIZE], [4, 7]]
    # What it chose: here the column with the largest entry.
    chosen = [int(graphs._forward.logits[row].argmax()) for row in range(2)]
    assert more.deliver() == {1: [chosen[0]], 2: [chosen[1]]}
    assert more.lens == [0, 1, 1, 0]
    # Page 10 was opened for the token of request 1; pages 8 and 9 are read as anchors.
    assert {10, 11} <= set(graphs._attention.kv.window.slots)
    assert rows.past_pages[:2].tolist() == [8, 9]


def test_a_draft_beside_leaves_nothing_behind(graphs, forward):
    run(graphs, plan_of((3, 1, [5])), [1], None, [-1, -1], [beside(1, 4, 7, [11])])
    logits, more = run(graphs, plan_of((3, 1, [5])), [2])
    assert more is None
    assert logits[:, :2].tolist() == [[2, 3]]
    assert forward.replayed[-1] % 2 == 0, "a graph without drafts"
