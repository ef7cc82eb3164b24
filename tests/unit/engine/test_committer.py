"""Committer: tokens that requests take from logits, and requests whose next token cannot be
chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.committer import Committer
from sglang_kvspec.engine.started_round import StartedRound
from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.metrics import SpecCounters
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.spec_sampler import SpecSampler

VOCAB, NUM_DRAFTS, CPU = 6, 3, torch.device("cpu")
NAN = float("nan")
GREEDY = SamplingParams(temperature=0, top_k=1)
SEEDED = SamplingParams(temperature=0.9, seed=5)
SAMPLED = SamplingParams(temperature=0.9)
every_kind = pytest.mark.parametrize(
    "kind", [GREEDY, SEEDED, SAMPLED], ids=["greedy", "seeded", "sampled"]
)


class NothingAllowed:
    """A grammar that allows no token, and never ends."""

    finished = False

    def is_terminated(self):
        return False

    def allocate_vocab_mask(self, vocab, rows, device):
        return torch.ones((rows, vocab), dtype=torch.bool)

    def fill_vocab_mask(self, mask, row):
        mask[row] = False

    def accept_token(self, token):
        raise ValueError(token)

    def rollback(self, count):
        pass

    def move_vocab_mask(self, mask, device):
        return mask

    def apply_vocab_mask(self, logits, mask):
        logits.masked_fill_(~mask, float("-inf"))


class Commits:
    """A committer, with a record of its calls to pages, counters and arrivals."""

    def __init__(self, *, come_with_requests=False, reads=None, scorer=None):
        self.pages, self.counters, self.noted = [], SpecCounters(), []
        keeper = SimpleNamespace(commit=lambda pages, *span: self.pages.append(span))
        arrivals = SimpleNamespace(
            come_with_requests=come_with_requests,
            note_verification=lambda state, count: self.noted.append((state.rid, count)),
        )
        sampler = SpecSampler(0, CPU)
        self.committer = Committer(sampler, keeper, arrivals, Ranks(), self.counters, reads, scorer)

    def commit(self, states, logits, *, wants_logprobs=False):
        rows = {
            i: Row(RowKind.VERIFY, state.verified_len, len(state.unverified), torch.tensor([i]))
            for i, state in enumerate(states)
        }
        batch = batch_of(states, wants_logprobs=wants_logprobs)
        top1 = Committer.top1(batch, rows, logits)
        return self.committer.commit(batch, rows, logits, top1)


def batch_of(states, **fields):
    return RoundBatch(states, [torch.tensor([i]) for i in range(len(states))], states, **fields)


def make_states(*kinds):
    """Make requests that have drafted token 2 each time."""
    states = []
    for i, kind in enumerate(kinds):
        state = request_state(str(i), committed_len=10)
        state.params = kind
        state.drafts = [2] * NUM_DRAFTS
        state.draft_probs = [torch.eye(VOCAB)[2]] * NUM_DRAFTS
        states.append(state)
    return states


def make_logits(num_requests):
    """Make logits from which the target chooses token 2, greedy or sampled."""
    logits = torch.zeros((num_requests * (NUM_DRAFTS + 1), VOCAB))
    logits[:, 2] = 200.0
    return logits


@every_kind
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("with_greedy", [True, False])
def test_only_a_request_whose_first_row_is_unsound_emits_nothing(kind, bad, with_greedy):
    states = make_states(GREEDY if with_greedy else SAMPLED, kind, kind)
    commits, logits = Commits(), make_logits(3)
    logits[NUM_DRAFTS + 1, 0] = bad
    emitted = commits.commit(states, logits)
    assert emitted[1] is not None
    assert emitted[1].tokens == []
    for i in (0, 2):
        assert emitted[i].tokens == [2] * (NUM_DRAFTS + 1)
        assert states[i].committed_len == 10 + NUM_DRAFTS + 1
    # The failed request is not counted, and its pages commit nothing.
    assert commits.counters.accept_histogram == {NUM_DRAFTS: 2}
    assert commits.counters.drafted == 2 * NUM_DRAFTS
    assert commits.pages == [(10, 10 + NUM_DRAFTS + 1)] * 2
    assert commits.noted == [("0", NUM_DRAFTS + 1), ("2", NUM_DRAFTS + 1)]
    assert states[1].committed_len == 10


def test_what_drafts_read_is_counted_by_request_and_in_all():
    """The tokens of context are those before the drafts."""
    few, every = states = make_states(GREEDY, GREEDY)
    few.budget = 0.1
    logits = make_logits(2)
    # The target chooses another token than the second draft of the other request.
    logits[NUM_DRAFTS + 2, 4] = 300.0
    mass = {"0": 0.75, "1": 0.25}
    scorer = SimpleNamespace(selection_s=0.25, mass_read=lambda state: mass[state.rid])
    reads = SimpleNamespace(tokens=lambda state: state.committed_len - 4)
    commits = Commits(reads=reads, scorer=scorer)
    commits.commit(states, logits)
    of_few = {"verifications": 1, "drafted": NUM_DRAFTS, "accepted": NUM_DRAFTS}
    of_every = {"verifications": 1, "drafted": NUM_DRAFTS, "accepted": 1}
    same = {"share": 0.6, "selection_ms": 250.0}
    assert few.draft_counts.report() == {**same, "mass": 0.75, "by_budget": {"0.1": of_few}}
    assert every.draft_counts.report() == {**same, "mass": 0.25, "by_budget": {"1.0": of_every}}
    assert commits.counters.drafts.report() == {
        **same,
        "mass": 0.5,
        "by_budget": {"0.1": of_few, "1.0": of_every},
    }
    assert commits.counters.drafts.read == 2 * NUM_DRAFTS * 6


def test_each_verification_counts_the_selections_since_the_last():
    commits = Commits(scorer=(scorer := SimpleNamespace(selection_s=0.5)))
    (first,) = states = make_states(GREEDY)
    for spent in (0.5, 0.5, 2.0):
        scorer.selection_s = spent
        first.drafts = [2] * NUM_DRAFTS
        commits.commit(states, make_logits(1))
    assert first.draft_counts.selection_s == commits.counters.drafts.selection_s == 2.0


def test_drafts_that_read_everything_read_all_of_the_mass():
    """Where drafts read less and no scorer knows the mass, none is reported."""
    for reads, expected in ((None, 1.0), (SimpleNamespace(tokens=lambda state: 1), None)):
        commits = Commits(reads=reads)
        commits.commit(make_states(GREEDY), make_logits(1))
        assert commits.counters.drafts.report()["mass"] == expected


@every_kind
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("wants_logprobs", [True, False])
def test_tokens_before_an_unsound_row_are_emitted(kind, at, wants_logprobs):
    states, commits = make_states(kind, kind), Commits()
    logits = make_logits(2)
    logits[at, 5] = NAN
    emitted = commits.commit(states, logits, wants_logprobs=wants_logprobs)
    assert emitted[0].tokens == [2] * at
    assert emitted[1].tokens == [2] * (NUM_DRAFTS + 1)
    # The next verification begins at the unsound row.
    states[0].drafts = [2]
    states[0].draft_probs = [torch.eye(VOCAB)[2]]
    (again,) = commits.commit(states[:1], logits[at : at + 2].clone())
    assert again.tokens == []


@every_kind
def test_a_request_whose_grammar_allows_nothing_emits_nothing(kind):
    states, commits = make_states(kind, GREEDY), Commits()
    states[0].grammar = NothingAllowed()
    emitted = commits.commit(states, make_logits(2))
    assert emitted[0].tokens == []
    assert emitted[1].tokens == [2] * (NUM_DRAFTS + 1)


def test_requests_without_a_row_have_no_entry():
    states, commits = make_states(GREEDY, GREEDY), Commits()
    batch = batch_of(states)
    rows = {1: Row(RowKind.VERIFY, 10, NUM_DRAFTS + 1, torch.tensor([1]))}
    logits = make_logits(1)
    first, second = commits.committer.commit(
        batch, rows, logits, Committer.top1(batch, rows, logits)
    )
    assert first is None
    assert second.tokens == [2] * (NUM_DRAFTS + 1)
    assert commits.committer.commit(batch, {}, None, ()) == [None, None]


def test_known_tokens_of_a_tail_are_not_judged():
    (state,) = make_states(GREEDY)
    state.tail = [4, 4]
    state.committed_len += 2
    commits, logits = Commits(), torch.zeros((NUM_DRAFTS + 3, VOCAB))
    logits[:2, 5] = 200.0
    logits[2:, 2] = 200.0
    (entry,) = commits.commit([state], logits)
    assert entry.tokens == [2] * (NUM_DRAFTS + 1)
    assert commits.pages == [(10, 12 + NUM_DRAFTS + 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_logits_reach_the_cpu_with_all_their_bits(dtype):
    """The largest logits are sent as integers, together with the tokens in one transfer."""
    logits = make_logits(1).to(dtype)
    logits[0], logits[1, 4], logits[2, 0] = -float("inf"), NAN, float("inf")
    rows = {0: Row(RowKind.VERIFY, 10, NUM_DRAFTS + 1, torch.tensor([0]))}
    tokens, bits = Committer.top1(batch_of(make_states(GREEDY)), rows, logits)
    assert tokens.dtype == bits.dtype == torch.int64
    largest = bits.view(torch.float64).tolist()
    assert largest[0] == -float("inf")
    assert largest[1] != largest[1]
    assert largest[2:] == [float("inf"), 200.0]
    assert tokens[3] == 2


def test_top1_tokens_are_not_asked_for_where_no_request_is_greedy():
    rows = {0: Row(RowKind.VERIFY, 10, NUM_DRAFTS + 1, torch.tensor([0]))}
    assert Committer.top1(batch_of(make_states(SAMPLED)), rows, make_logits(1)) == []
    assert Committer.top1(batch_of(make_states(GREEDY)), rows, None) == []


# Tokens without drafts


def plain_round(states, tokens, order, lens, logits=None):
    made = DraftedTokens(tokens, order, lens)
    timer = PhaseTimer(CPU)
    return StartedRound(states, [0] * len(states), timer, is_plain=True, made=made, logits=logits)


@pytest.mark.parametrize("come_with_requests", [True, False])
def test_plain_tokens_are_committed_as_the_device_made_them(come_with_requests):
    states = [request_state(str(i), committed_len=10 + i) for i in range(3)]
    commits = Commits(come_with_requests=come_with_requests)
    tokens = torch.tensor([[7, 4], [8, 5], [9, 6]])
    started = plain_round(states, tokens, [2, 0], [2, 0, 3])
    emitted = commits.committer.commit_plain(batch_of(states), started)
    assert emitted[2].tokens == [7, 8, 9]
    assert emitted[0].tokens == [4, 5]
    assert emitted[1] is None
    assert [state.committed_len for state in states] == [12, 11, 15]
    assert commits.counters.plain == 5
    assert commits.counters.verifications == 0
    assert sorted(commits.pages) == [(10, 12), (12, 15)]
    assert commits.noted == ([("2", 1)] * 3 + [("0", 1)] * 2 if come_with_requests else [])


def test_a_plain_token_is_chosen_from_its_logits_where_the_device_cannot_choose():
    states = [request_state(str(i), committed_len=10) for i in range(2)]
    states[0].params = SAMPLED
    logits = torch.zeros((4, VOCAB))
    logits[0, 3] = logits[1, 5] = 200.0
    commits = Commits()
    started = plain_round(states, torch.tensor([[0, 0]]), [1, 0], [1, 1], logits)
    emitted = commits.committer.commit_plain(batch_of(states, wants_logprobs=True), started)
    assert [entry.tokens for entry in emitted] == [[5], [3]]
    assert torch.equal(emitted[1].logits, logits[:1])
    assert [state.committed_len for state in states] == [11, 11]
