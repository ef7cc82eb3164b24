"""RoundLoop: plain rounds that are extended before their tokens are read, and forwards in
between."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.engine.committer import Committer
from sglang_kvspec.engine.loop import RoundLoop
from sglang_kvspec.engine.overlap import OverlappedRounds
from sglang_kvspec.engine.started_round import StartedRound
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.metrics import SpecCounters
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.spec_sampler import SpecSampler

CPU = torch.device("cpu")
PLAIN_STEPS = 8


class Lab:
    """A loop over fakes of a machine that holds all residuals. order: its actions, in order."""

    def __init__(self, fakes, *next_lens, pending=()):
        self.order, self.noted = [], []
        self._drafts_on_device = fakes.drafts_on_device
        arrivals = fakes.Arrivals(*pending)
        arrivals.note_drafts = self._note_drafts
        arrivals.note_verification = lambda state, count: None
        planner = SimpleNamespace(find_late=lambda states, pages: self.late)
        self.late = frozenset()
        plain = SimpleNamespace(advance=self._advance, advance_on=self._advance_on)
        drafter = SimpleNamespace(draft=self._draft)
        self.starter = fakes.starter_of(
            plain=plain,
            plain_steps=PLAIN_STEPS,
            planner=planner,
            arrivals=arrivals,
            drafter=drafter,
        )
        scheduler = fakes.Scheduler(*next_lens)
        pages = SimpleNamespace(
            flush=lambda: self.order.append("flush"),
            commit=lambda *args: None,
            note_use=lambda requests: None,
        )
        sampler, ranks, self.counters = SpecSampler(0, CPU), Ranks(), SpecCounters()
        slots = SimpleNamespace(num_free=9)
        self.starter.kv.window = SimpleNamespace(slots=slots)
        self.overlap = OverlappedRounds(self.starter, scheduler, pages, max_draft_len=31)
        self.loop = RoundLoop(
            scheduler=scheduler,
            planner=planner,
            starter=self.starter,
            verifier=SimpleNamespace(),
            committer=Committer(sampler, pages, arrivals, ranks, self.counters),
            overlap=self.overlap,
            observer=SimpleNamespace(
                observe_plain=lambda started, context: None,
            ),
            speeds=SimpleNamespace(),
            pages=pages,
            arrivals=arrivals,
            prompt_reader=SimpleNamespace(read_prompt_end=self._read_prompt_end),
            sampler=sampler,
            ranks=ranks,
        )

    def _draft(self, batch, lens):
        self.order.append("draft")
        return self._drafts_on_device(batch, lens)

    def _advance(self, batch, steps, late):
        self.order.append(f"{steps} steps")
        states = batch.states
        lens = [0 if i in late else min(steps, s.remaining) for i, s in enumerate(states)]
        order = [i for i, n in enumerate(lens) if n]
        tokens = torch.zeros((steps, len(order)), dtype=torch.int64)
        return DraftedTokens(tokens, order, lens), torch.zeros((len(order), 5))

    def _advance_on(self, made, steps):
        self.order.append(f"{steps} more")
        return DraftedTokens(torch.zeros((steps, 1), dtype=torch.int64), [0], [steps])

    def _read_prompt_end(self, batch):
        self.order.append("prompt end")
        logits = torch.zeros((1, 50))
        logits[0, 7] = 200.0
        return logits

    def _note_drafts(self, batch, index, ages_s, *, on_anchors):
        self.noted.append((index, tuple(ages_s), on_anchors))


@pytest.fixture
def deliveries(monkeypatch):
    """List that records when tokens of the device are read."""
    deliver, order = DraftedTokens.deliver, []

    def noted(self, tokens=None):
        order.append("read")
        return deliver(self, tokens)

    monkeypatch.setattr(DraftedTokens, "deliver", noted)
    return order


@pytest.mark.parametrize(
    ("next_lens", "wants_logprobs", "committed_len", "goes_on"),
    [
        ([0], False, 64, True),
        ([4], False, 64, False),
        ([0], True, 64, False),
        # The page has room for 4 more steps, or for 3.
        ([0], False, 64 + 52, True),
        ([0], False, 64 + 53, False),
    ],
)
def test_plain_rounds_are_extended_before_their_tokens_are_read(
    fakes, deliveries, next_lens, wants_logprobs, committed_len, goes_on
):
    lab = Lab(fakes, *next_lens)
    lab.order = deliveries
    state = request_state(committed_len=committed_len)
    batch = fakes.batch_of([state], wants_logprobs=wants_logprobs)
    started = StartedRound([state], [0], PhaseTimer(CPU), num_steps=8, is_plain=True)
    started.made = DraftedTokens(torch.zeros((8, 1), dtype=torch.int64), [0], [8])
    lab.overlap.ahead = started
    done = lab.loop.run_round(batch)
    assert len(done.emitted[0].tokens) == 8
    assert done.num_verified is None
    assert state.committed_len == committed_len + 8
    assert lab.counters.plain == 8
    if not goes_on:
        assert lab.order[0] == "read"
        assert not any("more" in each for each in lab.order)
        return
    steps = min(8, 64 - committed_len % 64 - 8)
    assert lab.order == [f"{steps} more", "read", "flush"]
    ahead = lab.overlap.ahead.for_batch([state])
    assert ahead.is_plain
    assert len(ahead.made.deliver()[0]) == steps
    # If the batch has changed meanwhile, the device must not continue alone.
    ahead.states = [state, request_state("new")]
    assert lab.starter.extend(ahead) is None


def test_a_plain_round_that_cannot_be_extended_precedes_the_planned_one(fakes, deliveries):
    lab = Lab(fakes, 4)
    lab.order = deliveries
    state = request_state()
    lab.overlap.ahead = StartedRound([state], [0], PhaseTimer(CPU), num_steps=8, is_plain=True)
    made = DraftedTokens(torch.zeros((8, 1), dtype=torch.int64), [0], [8])
    lab.overlap.ahead.made = made
    lab.loop.run_round(fakes.batch_of([state]))
    assert lab.order == ["read", "draft", "flush", "flush"]
    assert lab.overlap.ahead.lens == [4]


def test_another_forward_waits_for_the_round_and_interrupts_it(fakes):
    lab = Lab(fakes, 3)
    lab.starter.over_at = 1.0
    state = request_state()
    lab.overlap.ahead = StartedRound([state], [3], PhaseTimer(CPU))
    lab.loop.interrupt()
    assert lab.starter.side.joins == 1
    assert lab.overlap.ahead.is_interrupted
    assert lab.starter.over_at is None
    lab.overlap.ahead = None
    lab.loop.interrupt()
    assert lab.starter.side.joins == 2


def test_the_first_draft_on_anchors_waits_for_the_round_and_keeps_its_tokens(fakes):
    lab = Lab(fakes, 3, pending="r")
    other, state = request_state("other"), request_state("r")
    rows = torch.full((1, 1), 5)
    ahead = StartedRound([other], [1], PhaseTimer(CPU), made=DraftedTokens(rows, [0], [1]))
    lab.overlap.ahead = ahead
    lab.loop.start_on_anchors(fakes.batch_of([state]))
    assert lab.starter.side.joins == 1
    assert ahead.is_interrupted
    # The drafter writes into the memory of the tokens of the round.
    rows.fill_(-1)
    assert ahead.made.deliver() == {0: [5]}
    assert state.drafts == [7]
    assert lab.noted == [(0, (0.0,), True)]
