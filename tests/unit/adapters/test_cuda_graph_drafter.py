"""CudaGraphDrafter over steps that are not captured: the token that each draft follows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters import cuda_graph_drafter
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.runtime.draft_view import head_lists
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.spec_sampler import SpecSampler

SIZE, VOCAB, MAX_STEPS = 32, 50, 16
GREEDY = SamplingParams(temperature=0, top_k=1)
PENALISED = SamplingParams(temperature=0, top_k=1, presence_penalty=0.1)


class FakeGraphs:
    """Steps whose most likely token is the row's input plus 1. `seen` records the inputs of each
    step."""

    def __init__(self, forward, attention, rows, make_attention, **options):
        self.rows, self.batch_sizes, self.seen = rows, [4], []
        self.weights = options.get("weights")

    def time_empty_step(self):
        return 1e-3 if self.weights is None else 0.4e-3

    def plan(self, rows):
        pass

    def replay(self, batch):
        self.rows.begin_step(batch)
        tokens, positions = self.rows.input_ids[:batch], self.rows.positions[:batch]
        self.seen.append((tokens.tolist(), positions.tolist(), self.rows.slots[:batch].tolist()))
        logits = torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()
        self.rows.end_step(logits)
        return logits


@pytest.fixture
def make_drafter(make_device_kv, monkeypatch):
    monkeypatch.setattr(cuda_graph_drafter, "StepGraphs", FakeGraphs)
    makers = ("make_draft_step", "make_target_step", "make_short_target_step")
    attention = SimpleNamespace(**{name: name for name in makers}, short_steps_differ=True)
    kv = make_device_kv(page_size=SIZE)
    runner = SimpleNamespace(
        max_running_requests=4,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 8 * SIZE)),
    )
    sampler = SpecSampler(0, torch.device("cpu"))

    def make(view=None, weights=None):
        lists = head_lists(view, kv.geometry, kv.device)
        return cuda_graph_drafter.CudaGraphDrafter(
            runner, None, attention, kv, MAX_STEPS, sampler, Ranks(), view, lists, weights=weights
        )

    return make


@pytest.fixture
def drafter(make_drafter):
    return make_drafter()


def test_only_drafts_are_captured_with_copies_of_weights(make_drafter, monkeypatch):
    seen = {}

    class NotedGraphs(FakeGraphs):
        def __init__(self, forward, attention, rows, make_attention, **options):
            super().__init__(forward, attention, rows, make_attention, **options)
            seen[make_attention] = options.get("weights")

    monkeypatch.setattr(cuda_graph_drafter, "StepGraphs", NotedGraphs)
    drafter = make_drafter(weights="copies")
    assert (drafter.empty_step_s, drafter.empty_draft_step_s) == (1e-3, 0.4e-3)
    assert seen == {
        "make_draft_step": "copies",
        "make_target_step": None,
        "make_short_target_step": None,
    }


def state_of(pending, committed_len, params=GREEDY):
    return RequestState("r", committed_len, pending, [pending], params, remaining=100)


def batch_of(states, pages):
    return RoundBatch(states, [torch.tensor(ids) for ids in pages], [None] * len(states))


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["argmax", "chosen"])
def test_a_request_that_did_not_verify_drafts_on(drafter, params):
    a, b = state_of(5, 30, params), state_of(20, 3, params)
    batch = batch_of([a, b], [[7, 2], [9]])

    def draft(*lens):
        drafted = drafter.draft(batch, lens)
        if drafted is not None:
            for i, tokens in drafted.deliver().items():
                [a, b][i].drafts.extend(tokens)

    draft(4, 2)
    assert (a.drafts, b.drafts) == ([6, 7, 8, 9], [21, 22])
    # Only b verified, so it has its new pending token and no drafts.
    b.commit([21, 22, 33])
    before = len(drafter._drafts.seen)
    draft(2, 3)
    assert (a.drafts, b.drafts) == ([6, 7, 8, 9, 10, 11], [34, 35, 36])
    seen = drafter._drafts.seen[before:]
    # b drafts longest and comes first. a continues from its last draft, in its second page.
    assert [positions for _, positions, _ in seen] == [[6, 34], [7, 35], [8]]
    assert [tokens for tokens, _, _ in seen] == [[33, 9], [34, 10], [35]]
    slots = drafter._kv.window.slots
    assert [where for _, _, where in seen] == [
        [slots.slot_of(9), slots.slot_of(2)],
        [slots.slot_of(9), slots.slot_of(2)],
        [slots.slot_of(9)],
    ]


@pytest.mark.parametrize("length", [1, 3, 4, 9, SIZE])
def test_the_end_of_a_prompt_is_read_in_few_steps(drafter, length):
    """Each token has its own place, and sees the encoded pages and the tokens before it."""
    *tail, pending = range(11, 11 + length)
    state = state_of(pending, 2 * SIZE + len(tail))
    state.tail = tail
    replay, seen = drafter._drafts.replay, []

    def noted(batch):
        logits = replay(batch)
        rows = drafter._rows
        pasts = rows.past_indptr.diff()[:batch].tolist()
        seen.append((rows.tail_lens[:batch].tolist(), rows.offsets[:batch].tolist(), pasts))
        assert rows.past_pages[: 2 * batch].tolist() == [5, 3] * batch
        return logits

    drafter._drafts.replay = noted
    logits = drafter.read_prompt_end(batch_of([state], [[5, 3, 8]]))
    assert logits.shape == (1, VOCAB)
    assert int(logits.argmax()) == pending + 1
    steps = [range(first, min(first + 4, length)) for first in range(0, length, 4)]
    assert seen == [([n + 1 for n in step], list(step), [2] * len(step)) for step in steps]
    slot = drafter._kv.window.slots.slot_of(8)
    assert drafter._drafts.seen == [
        ([11 + n for n in step], [2 * SIZE + n for n in step], [slot] * len(step)) for step in steps
    ]
    assert list(drafter._kv.window.slots) == [8]
    # The next draft step follows the first draft.
    state.drafts = [pending + 1]
    drafted = drafter.draft(batch_of([state], [[5, 3, 8, 6]]), [2])
    assert drafted.deliver() == {0: [pending + 2, pending + 3]}
    assert drafter._drafts.seen[-2][:2] == ([pending + 1], [2 * SIZE + length])


def test_plain_steps_skip_late_requests(drafter):
    """A late request lacks residuals, and may have drafts."""
    late, ready = state_of(5, 30), state_of(20, 3)
    late.drafts = [6, 7]
    made, _ = drafter.advance(batch_of([late, ready], [[7, 2], [9]]), 3, {0})
    assert made.deliver() == {1: [21, 22, 23]}
    assert list(drafter._kv.window.slots) == [9]


def test_plain_steps_are_extended_before_their_tokens_are_read(drafter):
    """The device continues alone, from its last token and position."""
    a, b = state_of(5, 2), state_of(20, 33)
    states = [a, b]
    batch = batch_of(states, [[7], [9, 4]])
    made, _ = drafter.advance(batch, 4, ())
    more = drafter.advance_on(made, 3)
    again = drafter.advance_on(more, 2)
    # The CPU reads the tokens after all steps are enqueued.
    assert made.deliver() == {0: [6, 7, 8, 9], 1: [21, 22, 23, 24]}
    assert more.deliver() == {0: [10, 11, 12], 1: [25, 26, 27]}
    assert again.deliver() == {0: [13, 14], 1: [28, 29]}
    seen = drafter._short_target.seen
    assert [positions for _, positions, _ in seen] == [[2 + step, 33 + step] for step in range(9)]
    assert [tokens for tokens, _, _ in seen] == [[5 + step, 20 + step] for step in range(9)]
    slots = drafter._kv.window.slots
    assert {tuple(where) for _, _, where in seen} == {(slots.slot_of(7), slots.slot_of(4))}
    # The CPU continues from the same place.
    for state in states:
        state.commit(list(range(state.pending + 1, state.pending + 10)))
    made, _ = drafter.advance(batch, 1, ())
    assert drafter._short_target.seen[-1][:2] == ([14, 29], [11, 42])


class FirstOrSecond:
    """View in which layers and heads alternate between the first two pages."""

    per_head = True

    def __init__(self, geometry):
        layers, heads = torch.arange(geometry.num_layers), torch.arange(geometry.num_kv_heads)
        self.pages = (layers[:, None] + heads) % 2

    def select(self, state, num_pages):
        return self.pages[..., None] if num_pages >= 2 else None


def test_layers_and_heads_draft_on_pages_of_their_own(make_drafter):
    geometry = make_drafter()._kv.geometry
    view = FirstOrSecond(geometry)
    drafter = make_drafter(view)
    kv, rows = drafter._kv, drafter._rows
    kv.begin_encode([7, 2, 9])
    kv.finish_encode([7, 2, 9])
    states = [state_of(5, 2 * SIZE + 3), state_of(20, SIZE + 3)]
    batch = batch_of(states, [[7, 2, 4], [9, 8]])
    assert drafter.draft(batch, [2, 1]).deliver() == {0: [6, 7], 1: [21]}
    assert torch.equal(rows.head_pages[0], torch.tensor([7, 2])[view.pages].int())
    assert (rows.head_pages[1] == 9).all()
    assert rows.list_indptr.tolist() == [0, 1, 2, 2, 2]
    # Plain steps read all pages from one list, at the target precision.
    drafter.advance(batch, 1, ())
    assert rows.past_pages[:3].tolist() == [7, 2, 9]
