"""VerifyGraphs over forwards that are not captured: the rows that a replay reads, and its
results."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.adapters import verify_graphs
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.targets.int8 import Int8TargetAttention

SIZE, MAX_ROWS, MAX_DRAFTS, VOCAB, MAX_PIGGYBACK = 64, 2, 8, 7, 3


class FakeForward:
    """Forward whose logits name each token: logits[t] = (input id, position, -1, ...)."""

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
    num_heads = 2 * kv.geometry.num_kv_heads
    attention = DeviceAttention(kv, num_heads, Int8TargetAttention(kv, num_heads))
    runner = SimpleNamespace(
        max_running_requests=MAX_ROWS,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(MAX_ROWS, 4 * SIZE)),
    )
    sizes = verify_graphs.sizes_of(runner, attention, MAX_DRAFTS, MAX_PIGGYBACK)
    return verify_graphs.VerifyGraphs(runner, forward, attention, MAX_DRAFTS, sizes, MAX_PIGGYBACK)


def verifying(start, tokens, pages, num_made=0):
    """Make a request that verifies its pending token and drafts, `tokens`, from position `start`
    on. num_made: further drafts, which only the device knows."""
    state = request_state(committed_len=start)
    state.pending, *state.drafts = tokens
    return state, Row(RowKind.VERIFY, start, len(tokens) + num_made, torch.tensor(pages))


def drafting(start, token, pages, num_made=0):
    """Make a request that drafts once, at position `start`, after `token` or after drafts that only
    the device knows."""
    state = request_state(committed_len=start - num_made)
    state.pending = token
    return state, Row(RowKind.DRAFT, start, 1, torch.tensor(pages))


def run(graphs, requests, made=None):
    states = [state for state, _ in requests]
    rows = {i: row for i, (_, row) in enumerate(requests)}
    batch = RoundBatch(states, [row.pages for row in rows.values()], [None] * len(states))
    verify = {i: row for i, row in rows.items() if row.kind is RowKind.VERIFY}
    piggyback = {i: row for i, row in rows.items() if row.kind is RowKind.DRAFT}
    return graphs.run(batch, verify, made, piggyback)


def test_logits_are_those_of_the_rows_tokens(graphs):
    # The first request has pages 3 and 4, and fills page 3 in the verification.
    requests = [verifying(62, [10, 11, 12, 13], [3, 4]), verifying(5, [20, 21], [7])]
    out = run(graphs, requests)
    assert out.logits[:, 0].tolist() == [10, 11, 12, 13, 20, 21]
    assert out.logits[:, 1].tolist() == [62, 63, 64, 65, 5, 6]
    assert out.drafted is None
    assert out.draft_logits is None
    window = graphs._attention.kv.window.slots
    assert set(window) == {3, 4, 7}
    # The next forward can begin.
    run(graphs, [verifying(6, [30], [7])])


def test_drafts_that_are_only_on_the_device_are_verified(graphs):
    made = DraftedTokens(torch.tensor([[50, 60], [51, 0]]), order=[1, 0], lens=[1, 2])
    # The first request has the second column. Both begin with their pending tokens.
    requests = [verifying(3, [1], [5], num_made=1), verifying(9, [2], [6], num_made=2)]
    out = run(graphs, requests, made)
    assert out.logits[:, 0].tolist() == [1, 60, 2, 50, 51]


def test_a_verification_without_room_leaves_nothing_behind(graphs, forward):
    graphs.sizes = [size for size in graphs.sizes if size.max_qo_len < MAX_DRAFTS + 1]
    request = verifying(3, list(range(MAX_DRAFTS + 1)), [5])
    assert run(graphs, [request]) is None
    assert not forward.replayed
    assert not list(graphs._attention.kv.window.slots)
    # No forward has begun, so another one can.
    with graphs._attention.laid_out(ForwardPlan((request[1],))):
        pass


def test_large_forwards_are_captured_first(graphs, forward):
    alone, with_drafts = forward.captured[::2], forward.captured[1::2]
    assert len(alone) == len(graphs.sizes)
    assert alone == sorted(alone, reverse=True)
    assert with_drafts == [MAX_PIGGYBACK + num_tokens for num_tokens in alone]


def test_piggyback_drafts_are_made_in_the_same_forward(graphs):
    """Requests 0 and 3 verify. Request 1 drafts after a draft of this round, and request 2 after
    its pending token."""
    made = DraftedTokens(torch.tensor([[50, 60], [51, 0]]), order=[1, 3], lens=[0, 2, 0, 1])
    requests = [
        verifying(3, [1], [5]),
        drafting(2 * SIZE, 0, [8, 9, 10], num_made=2),
        drafting(7, 4, [11]),
        verifying(9, [2], [6], num_made=1),
    ]
    out = run(graphs, requests, made)
    assert out.logits[:, :2].tolist() == [[1, 3], [2, 9], [60, 10]]
    rows = graphs._piggyback.drafts
    assert rows.input_ids.shape == (MAX_PIGGYBACK,)
    assert graphs._forward.logits[:2, :2].tolist() == [[51, 2 * SIZE], [4, 7]]
    assert torch.equal(out.draft_logits, graphs._forward.logits[:2])
    # The draft is the largest entry of the fake logits.
    chosen = [int(graphs._forward.logits[row].argmax()) for row in range(2)]
    assert out.drafted.deliver() == {1: [chosen[0]], 2: [chosen[1]]}
    assert out.drafted.lens == [0, 1, 1, 0]
    # Page 10 was opened for the token of request 1; pages 8 and 9 are read as anchors.
    assert {10, 11} <= set(graphs._attention.kv.window.slots)
    assert rows.past_pages[:2].tolist() == [8, 9]


def test_a_piggyback_draft_leaves_nothing_behind(graphs, forward):
    run(graphs, [verifying(3, [1], [5]), drafting(7, 4, [11])])
    out = run(graphs, [verifying(3, [2], [5])])
    assert out.drafted is None
    assert out.logits[:, :2].tolist() == [[2, 3]]
    assert forward.replayed[-1] % 2 == 0, "a graph without drafts"
