"""Steps with proposals are taken where they pay. Other rounds are those of the given drafter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import WideLogits
from sglang_kvspec.engine.proposed_steps import ProposedSteps
from sglang_kvspec.engine.selective_drafter import SelectiveDrafter, StepSeconds
from sglang_kvspec.runtime.draft_counts import DraftCounts
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, top_k=1)
# Tokens count upwards and begin again, so that text repeats.
PERIOD = 40
DRAFT_LEN = 16
ORDINARY_S, REST_S = 1e-3, 4e-3


def token_after(token):
    return (token + 1) % PERIOD


class Machine:
    """Device and CPU with times of their own. Every round accepts all drafts."""

    def __init__(self, wide_s, lag_s=1e-3):
        self.time_s, self.wide_s, self.lag_s = 0.0, wide_s, lag_s
        self.kinds = []

    def now(self):
        return self.time_s

    # Ordinary drafter: the device alone knows what it makes.

    def draft(self, batch, lens):
        self.kinds.append("ordinary")
        steps = max(lens)
        order = [i for i, n in enumerate(lens) if n]
        columns = []
        for i in order:
            token, column = batch.states[i].last_token, []
            for _ in range(steps):
                token = self.following(batch.states[i], token)
                column.append(token)
            columns.append(column)
        self.pending_s = steps * ORDINARY_S
        return DraftedTokens(torch.tensor(columns).T, order, lens)

    def following(self, state, token):
        # A request without a pattern never repeats itself.
        return token + 1 if state.rid == "new" else token_after(token)

    # Wide steps

    def begin(self, batch, lens):
        self.time_s += 1e-4

    def most_proposed(self, state, num_requests):
        return 15

    def run(self, batch, proposed):
        width = 4 if max(map(len, proposed.values())) < 4 else 16
        self.kinds.append(width)
        self.time_s += self.wide_s[width]
        top1, firsts = [], {}
        for i, tokens in proposed.items():
            firsts[i] = len(top1)
            state = batch.states[i]
            top1 += [self.following(state, t) for t in (state.last_token, *tokens)]
        return WideLogits(torch.empty(0), top1, firsts)

    def end_round(self, batch, made):
        """Verify: commit all drafts, and one token more."""
        self.time_s += REST_S
        if made is None:
            self.time_s += self.lag_s
        else:
            self.time_s += self.pending_s
            for i, tokens in made.deliver().items():
                batch.states[i].drafts += tokens
        for state in batch.states:
            emitted = [*state.drafts, self.following(state, state.last_token)]
            state.commit(emitted)


class FakeTimer:
    """PhaseTimer that reads the machine."""

    def __init__(self, machine):
        self.machine = machine

    def start(self):
        pass

    def mark(self):
        self.steps_s = self.machine.pending_s

    def seconds(self):
        return [self.steps_s]


@pytest.fixture
def serve():
    def run(rids, wide_s, rounds=40, **options):
        machine = Machine(wide_s)
        counts = DraftCounts()
        sampler = SimpleNamespace()
        drafter = SelectiveDrafter(
            ProposedSteps(machine, sampler, Ranks(), counts),
            machine,
            StepSeconds(ORDINARY_S, lambda n: {w: ORDINARY_S for w in wide_s}),
            Ranks(),
            CPU,
            now=machine.now,
            **options,
        )
        drafter._timer = FakeTimer(machine)
        states = []
        for n, rid in enumerate(rids):
            first = 1000 * (n + 1) if rid == "new" else 5 + n
            prompt = [first - 1, first] if rid == "new" else list(range(PERIOD)) * 2
            state = RequestState(rid, len(prompt), first, [first], GREEDY, remaining=10**6)
            state.prompt = prompt
            states.append(state)
        for _ in range(rounds):
            batch = RoundBatch(states, [None] * len(states), [None] * len(states))
            machine.end_round(batch, drafter.draft(batch, [DRAFT_LEN] * len(states)))
        return machine, states, counts

    return run


def tokens_per_s(machine, states):
    return sum(len(state.output) for state in states) / machine.time_s


CHEAP, DEAR = {4: 1.1e-3, 16: 1.4e-3}, {4: 9e-3, 16: 18e-3}


def test_text_that_repeats_takes_fewer_steps_where_these_are_cheap(serve):
    machine, states, counts = serve(["a"], CHEAP)
    expected = [(5 + n) % PERIOD for n in range(len(states[0].output))]
    assert states[0].output == expected
    assert counts.steps + counts.kept >= len(expected) * 0.9
    assert counts.kept > 5 * counts.steps / 2
    assert 0 < counts.proposing <= counts.steps
    times_ms = counts.step_ms["1"]
    assert times_ms["wide_16"] == pytest.approx(1.4, rel=0.01)
    assert times_ms["waited_rest"] == pytest.approx((REST_S + machine.lag_s) * 1e3, rel=0.05)
    own = (DRAFT_LEN + 1) / (DRAFT_LEN * ORDINARY_S + REST_S)
    assert tokens_per_s(machine, states) > 1.5 * own


def test_dear_steps_are_given_up(serve):
    machine, states, _ = serve(["a"], DEAR, rounds=400)
    own = (DRAFT_LEN + 1) / (DRAFT_LEN * ORDINARY_S + REST_S)
    assert tokens_per_s(machine, states) > 0.98 * own
    # Prices fade, and steps with proposals are tried again at times.
    assert any(kind != "ordinary" for kind in machine.kinds[100:])


def test_text_without_matches_is_drafted_as_by_the_other_drafter(serve):
    machine, _, counts = serve(["new"], CHEAP, rounds=10)
    assert machine.kinds == ["ordinary"] * 10
    assert machine.time_s == pytest.approx(10 * (DRAFT_LEN * ORDINARY_S + REST_S))
    assert counts.steps == 10 * DRAFT_LEN
    assert not counts.proposed


def test_a_request_without_matches_does_not_keep_others_from_theirs(serve):
    machine, states, _ = serve(["a", "b", "c", "new"], CHEAP)
    assert machine.kinds.count("ordinary") < 5
    own = 4 * (DRAFT_LEN + 1) / (DRAFT_LEN * ORDINARY_S + REST_S)
    assert tokens_per_s(machine, states) > 1.2 * own
    # The request without matches goes on, with fewer drafts a round.
    assert len(states[3].output) > 40


@pytest.mark.parametrize("always", [False, True])
def test_a_batch_without_room_takes_ordinary_steps(serve, always):
    machine, _, counts = serve(["a", "b"], {}, rounds=5, always=always)
    assert machine.kinds == ["ordinary"] * 5
    assert counts.steps == 2 * 5 * DRAFT_LEN


def test_proposals_may_be_forced(serve):
    machine, _, _ = serve(["a"], DEAR, rounds=20, always=True)
    assert machine.kinds.count("ordinary") < 3
