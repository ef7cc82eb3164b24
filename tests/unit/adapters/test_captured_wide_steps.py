"""Wide steps of a GPU server's drafter over graphs that are not captured."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters import cuda_graph_drafter
from sglang_kvspec.adapters.captured_wide_steps import CapturedWideSteps
from sglang_kvspec.adapters.wide_graphs import MOST_TOKENS, wide_sizes
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.proposed_steps import ProposedSteps
from sglang_kvspec.engine.selective_drafter import SelectiveDrafter, StepSeconds
from sglang_kvspec.planning.proposals import Proposal
from sglang_kvspec.runtime.draft_counts import DraftCounts
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.spec_sampler import SpecSampler
from sglang_kvspec.runtime.wide_rows import WideRows

SIZE, VOCAB, MAX_STEPS = 32, 100, 16
GREEDY = SamplingParams(temperature=0, top_k=1)
PENALISED = SamplingParams(temperature=0, top_k=1, presence_penalty=0.1)


def next_logits(tokens):
    return torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()


class FakeSteps:
    """StepGraphs whose most likely token is the row's input plus 1. `num` counts steps."""

    def __init__(self, forward, attention, rows, make_attention, **options):
        self.rows, self.batch_sizes, self.num = rows, [4], 0

    def time_empty_step(self):
        return 1e-3

    def replay(self, batch):
        self.num += 1
        self.rows.begin_step(batch)
        logits = next_logits(self.rows.input_ids[:batch])
        self.rows.end_step(logits)
        return logits


class FakeWide:
    """WideGraphs with the same model. `seen` has (token, position, page slot) of written tokens,
    by step."""

    def __init__(self, forward, attention, rows, max_draft_len, weights):
        self.rows, self.sizes = WideRows(rows, MOST_TOKENS), wide_sizes(4, max_draft_len)
        self.seen, self.widths = [], []

    def empty_step_s(self, num_requests):
        return {4: 1e-3, 16: 1.2e-3}

    def most_tokens(self, num_requests):
        return 16

    def width(self, num_requests, num_tokens):
        return 4 if num_tokens <= 4 else 16

    def replay(self, num_requests, num_tokens):
        rows, count = self.rows, num_requests * num_tokens
        logits = next_logits(rows.input_ids[:count])
        self.widths.append(num_tokens)
        places = torch.stack((rows.input_ids, rows.positions, rows.slots))[:, :count].T.tolist()
        self.seen.append([tuple(place) for place in places if place[2] >= 0])
        rows.begin_step(count)
        rows.end_step(logits)
        return logits


class Scripted:
    """Stand-in for RequestNgrams that proposes these runs, one for each call."""

    def __init__(self, *runs):
        self.runs, self.seen = list(runs), []

    def follow(self, prompt, output):
        pass

    def look_up(self, drafts, most):
        tokens = (self.runs.pop(0) if self.runs else [])[:most]
        return Proposal(tokens, (False, 2), 0.8)

    def begin_trial(self, proposal, drafts, num_output):
        pass

    def end_trial(self, output, drafts):
        pass

    def observe(self, proposal, num_kept):
        self.seen.append((len(proposal.tokens), num_kept))


@pytest.fixture
def own(make_device_kv, monkeypatch):
    monkeypatch.setattr(cuda_graph_drafter, "StepGraphs", FakeSteps)
    monkeypatch.setattr(cuda_graph_drafter, "WideGraphs", FakeWide)
    makers = ("make_draft_step", "make_target_step", "make_short_target_step")
    attention = SimpleNamespace(**{name: name for name in makers}, short_steps_differ=False)
    runner = SimpleNamespace(
        max_running_requests=4,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 8 * SIZE)),
    )
    sampler, kv = SpecSampler(0, torch.device("cpu")), make_device_kv(page_size=SIZE)
    return cuda_graph_drafter.CudaGraphDrafter(
        runner, None, attention, kv, MAX_STEPS, sampler, Ranks(), is_wide=True
    )


@pytest.fixture
def drafter(own):
    device = torch.device("cpu")
    steps = CapturedWideSteps(own, own.wide)
    return SelectiveDrafter(
        ProposedSteps(steps, SpecSampler(0, device), Ranks(), DraftCounts()),
        own,
        StepSeconds(own.empty_draft_step_s, own.wide.empty_step_s),
        Ranks(),
        device,
        always=True,
        # Seconds: each look at the clock takes one millisecond.
        now=itertools.count(0.0, 1e-3).__next__,
    )


def state_of(pending, committed_len, ngrams, params=GREEDY):
    state = RequestState("r", committed_len, pending, [pending], params, remaining=100)
    state.ngrams = ngrams
    return state


def batch_of(states, pages):
    return RoundBatch(states, [torch.tensor(ids) for ids in pages], [None] * len(states))


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["argmax", "chosen"])
def test_drafts_behind_a_wrong_proposal_are_made_again(drafter, own, params):
    state = state_of(5, 30, Scripted([6, 7, 99], [9, 10, 11, 12, 13, 14]), params)
    assert drafter.draft(batch_of([state], [[7, 2]]), [10]) is None
    assert state.drafts == list(range(6, 16))
    # The last token of a step follows the kept ones, at the next position and in the next page.
    here, behind = (own._kv.window.slots.slot_of(page) for page in (7, 2))
    assert own.wide.seen == [
        [(5, 30, here), (6, 31, here), (7, 32, behind), (99, 33, behind)],
        [(8 + n, 33 + n, behind) for n in range(7)],
    ]
    assert own.wide.widths == [4, 16]
    assert state.ngrams.seen == [(3, 2), (6, 6)]


def test_requests_with_other_goals_share_steps(drafter, own):
    a = state_of(5, 30, Scripted([6, 7, 8], [10, 11, 12]))
    b = state_of(20, 3, Scripted([21]))
    assert drafter.draft(batch_of([b, a], [[9], [7, 2]]), [2, 8]) is None
    assert (a.drafts, b.drafts) == (list(range(6, 14)), [21, 22])
    # b has all its drafts after the first step, and writes nothing in the second.
    assert [len(step) for step in own.wide.seen] == [6, 4]


def test_nothing_proposed_leaves_drafts_on_the_device(drafter, own):
    a, b = state_of(5, 30, Scripted()), state_of(20, 3, Scripted())
    made = drafter.draft(batch_of([a, b], [[7, 2], [9]]), [4, 2])
    assert made.deliver() == {0: [6, 7, 8, 9], 1: [21, 22]}
    assert not a.drafts
    assert not own.wide.seen
    assert own._drafts.num == 4


def test_ordinary_steps_end_a_round_where_text_departs(drafter, own):
    state = state_of(5, 30, Scripted([6, 7, 8], []))
    made = drafter.draft(batch_of([state], [[7, 2]]), [16])
    # The device alone knows the drafts behind the step with proposals.
    assert state.drafts == [6, 7, 8, 9]
    assert made.deliver() == {0: list(range(10, 22))}
    assert len(own.wide.seen) == 1
    assert own._drafts.num == 12
