"""What ends, or outlives, a round that was begun ahead: the worker alone, without a server."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from kvspec_patches import spec_tokens, weight_load
from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.adapters.round_worker import RoundWorker
from sglang_kvspec.adapters.worker import KVSpecWorker
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.started_round import StartedRound


class Fence:
    """Counts how often it was waited for."""

    def __init__(self) -> None:
        self.joins = 0

    def join(self) -> None:
        self.joins += 1


@pytest.fixture
def worker() -> Any:
    """A worker that has begun a round, and nothing else."""
    worker = RoundWorker.__new__(RoundWorker)
    worker._side = Fence()
    worker._pool = SimpleNamespace(prefix_tiers=None, early_starts=None)
    worker.apart = None
    worker._ahead = StartedRound([], [], PhaseTimer(torch.device("cpu")))
    return worker


def test_a_prefill_waits_for_the_round_and_holds_it_up(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins: list[int] = []
    monkeypatch.setattr(
        KVSpecWorker, "_prefill", lambda self, batch: joins.append(self._side.joins)
    )
    worker._prefill(None)
    assert joins == [1], "the prefill must come after the wait"
    assert worker._ahead.is_held_up
    worker._ahead = None
    worker._prefill(None)


def test_new_weights_end_the_round(worker: Any) -> None:
    weight_load.hook(SimpleNamespace(draft_worker=worker), "distributed")
    assert worker._ahead is None
    assert worker._side.joins == 1


def test_new_weights_end_the_use_of_prefixes_on_disk(worker: Any) -> None:
    told: list[bool] = []
    worker._pool.prefix_tiers = SimpleNamespace(weights_will_change=lambda: told.append(True))
    weight_load.hook(SimpleNamespace(draft_worker=worker), "disk")
    assert told == [True]


def test_every_update_of_weights_is_announced() -> None:
    updates = [
        method
        for name, method in inspect.getmembers(SchedulerWeightUpdaterManager)
        if name.startswith("update_weights_from_")
    ]
    assert len(updates) >= 4
    for update in updates:
        assert "with self._observe_weight_load(" in inspect.getsource(update)


def make_req(**fields: Any) -> Any:
    req = Req.__new__(Req)
    values = {
        "is_retracted": False,
        "finished_reason": None,
        "spec_verify_ct": 3,
        "spec_num_correct_drafts": 9,
        "spec_correct_drafts_histogram": [1, 0, 1, 0, 0, 0, 0, 1],
    }
    for name, value in (values | fields).items():
        setattr(req, name, value)
    return req


def counts(req: Any) -> tuple[int, int, list[int]]:
    return req.spec_verify_ct, req.spec_num_correct_drafts, req.spec_correct_drafts_histogram


def test_tokens_taken_without_drafts_are_not_counted_as_accepted() -> None:
    # The last of them counted a run of eight; one emitted nothing, one had finished before.
    reqs = [make_req(), make_req(), make_req(finished_reason="length")]
    result = SimpleNamespace(cap_lens=None, num_correct_drafts_per_req_cpu=[7, -1, 7])
    spec_tokens.hook([], None, result, SimpleNamespace(reqs=reqs))
    assert counts(reqs[0]) == (2, 2, [1, 0, 1])
    assert counts(reqs[1]) == counts(reqs[2]) == counts(make_req())


def test_verified_drafts_are_counted() -> None:
    req = make_req()
    result = SimpleNamespace(cap_lens=torch.tensor([8]), num_correct_drafts_per_req_cpu=[7])
    spec_tokens.hook([], None, result, SimpleNamespace(reqs=[req]))
    assert counts(req) == counts(make_req())


@pytest.mark.parametrize(
    ("remaining", "drafts", "takes"), [(9, [], True), (0, [], False), (9, [4], False)]
)
def test_tokens_without_drafts_are_taken_by_who_can(
    worker: Any, remaining: int, drafts: list[int], takes: bool
) -> None:
    """Beside a request whose residuals are late: not where the other has no token left to take, or
    drafts, made while its own were late, that are to be verified."""
    late, ready = (request_state(rid, num_drafts=2) for rid in "ab")
    ready.remaining, ready.drafts = remaining, drafts
    asked: list[Any] = []

    def advance(states: Any, pages: Any, steps: int, late: Any) -> Any:
        asked.append(late)
        return DraftedTokens(torch.zeros((1, 1)), [1], [0, 1]), None

    plan = SimpleNamespace(host_pages=0)
    worker.kv = SimpleNamespace(device=torch.device("cpu"), plan=plan)
    worker._holds_all, worker._over_at = True, None
    worker._side, worker._graphs = nullcontext(), SimpleNamespace(advance=advance)
    worker.speculative_num_draft_tokens = 32
    batch = SimpleNamespace(return_logprob=False, reqs=[SimpleNamespace(grammar=None)] * 2)
    started = worker._start(batch, [late, ready], [None, None], [0, 0], frozenset({0}))
    assert asked == ([frozenset({0})] if takes else [])
    assert started.is_plain == takes
    assert started.verify == [1]
    assert started.lacking == frozenset()


def test_a_round_knows_whose_residuals_were_late_when_it_began(worker: Any) -> None:
    """They may come while it drafts, and its drafts were made without them."""
    here, lacking = (request_state(rid, num_drafts=2) for rid in "ab")
    decoding = SimpleNamespace(is_lacking=lambda state: state is lacking)
    worker.apart = SimpleNamespace(decoding=decoding)
    worker.kv = SimpleNamespace(device=torch.device("cpu"), plan=SimpleNamespace(host_pages=0))
    worker._holds_all, worker._over_at, worker._graphs = False, None, None
    worker._side, worker._eager = nullcontext(), SimpleNamespace(draft=lambda *_: None)
    started = worker._start(None, [here, lacking], [None, None], [1, 1], frozenset())
    assert started.lacking == {1}


def test_who_drafts_beside_a_verification(worker: Any) -> None:
    """Requests 0 verifies, 1 takes a sampled token, 2 has all drafts that it can use, the others
    have some, and there is room for two."""
    states = [request_state(str(rid), num_drafts=n) for rid, n in enumerate((2, 2, 8, 5, 1, 3))]
    states[1].params = SimpleNamespace(is_argmax=False)
    reqs = [SimpleNamespace(grammar=None) for _ in states]
    pages = [torch.arange(4)] * len(states)
    num_drafts = [len(state.drafts) + 1 for state in states]
    worker._most_beside = 2
    worker._lengths = SimpleNamespace(pays=lambda state, count: count <= 8)
    rows = worker._rows_beside(SimpleNamespace(reqs=reqs), states, pages, num_drafts, [0])
    assert list(rows) == [4, 5]
    for i, row in rows.items():
        assert (row.start, row.length) == (states[i].committed_len + num_drafts[i], 1)
    worker._most_beside = 0
    assert not worker._rows_beside(SimpleNamespace(reqs=reqs), states, pages, num_drafts, [0])


@pytest.mark.parametrize(
    ("next_len", "position", "num_free", "order"),
    [
        (3, 64 + 20, 0, ["start", "flush", "plan"]),
        # Tokens without drafts are to see full pages as they are encoded.
        (0, 64 + 20, 9, ["flush", "start", "flush", "plan"]),
        # Two requests run on into another page, or begin one.
        (3, 64 + 62, 2, ["start", "flush", "plan"]),
        (3, 64 + 62, 1, ["flush", "start", "flush", "plan"]),
        (3, 128, 1, ["flush", "start", "flush", "plan"]),
    ],
)
def test_full_pages_are_encoded_behind_the_next_drafts(
    worker: Any, next_len: int, position: int, num_free: int, order: list[str]
) -> None:
    """Who verifies is planned when they are, as their residuals count."""
    done: list[str] = []
    states = [request_state(rid, committed_len=position) for rid in "ab"]
    window = SimpleNamespace(slots=SimpleNamespace(num_free=num_free))
    geometry, plan = SimpleNamespace(page_size=64), SimpleNamespace(host_pages=9)
    worker.kv = SimpleNamespace(window=window, geometry=geometry, plan=plan)
    worker.pages = SimpleNamespace(flush=lambda: done.append("flush"))
    worker.config = SimpleNamespace(max_draft_len=16)
    worker._graphs, worker._next_budget, worker._ahead = object(), object(), None
    worker._next_lens = [next_len] * 2
    worker._start = lambda *_: done.append("start") or SimpleNamespace(plan=None)
    worker.stepper = SimpleNamespace(plan_ahead=lambda *_: done.append("plan"))
    reqs = [SimpleNamespace(grammar=None)] * 2
    batch = SimpleNamespace(return_logprob=False, reqs=reqs)
    worker.apart = None
    worker._begin_ahead(batch, states, [None, None], frozenset())
    assert done == order


@pytest.mark.parametrize(
    ("next_lens", "logprob", "committed_len", "goes_on"),
    [
        ([0], False, 64, True),
        ([4], False, 64, False),
        ([0], True, 64, False),
        # The page has room for 4 steps more, or for 3.
        ([0], False, 64 + 52, True),
        ([0], False, 64 + 53, False),
    ],
)
def test_plain_rounds_go_on_before_their_tokens_are_read(
    worker: Any, next_lens: list[int], logprob: bool, committed_len: int, goes_on: bool
) -> None:
    order: list[str] = []

    class Made(DraftedTokens):
        def deliver(self) -> dict[int, list[int]]:
            order.append("read")
            return super().deliver()

    def advance_on(made: Any, steps: int) -> Any:
        order.append(f"{steps} more")
        return Made(torch.zeros((steps, 1)), [0], [steps])

    state = request_state(committed_len=committed_len)
    worker.kv = SimpleNamespace(device=torch.device("cpu"), geometry=SimpleNamespace(page_size=64))
    worker._side, worker._graphs = nullcontext(), SimpleNamespace(advance_on=advance_on)
    worker._plan_next = lambda states, late: setattr(worker, "_next_lens", next_lens)
    worker.pages = SimpleNamespace(commit=lambda *_: None)
    worker.counters = SimpleNamespace(observe_plain=lambda count: None)
    worker.speculative_num_draft_tokens = 32
    worker._ahead = None
    started = StartedRound([state], [0], PhaseTimer(torch.device("cpu")), num_steps=8)
    started.is_plain = True
    started.made = Made(torch.zeros((8, 1)), [0], [8])
    batch = SimpleNamespace(return_logprob=logprob, reqs=[SimpleNamespace(grammar=None)])
    verified, _ = worker._finish_plain(batch, [state], [None], started)
    assert len(verified[0].tokens) == 8
    assert state.committed_len == committed_len + 8
    if not goes_on:
        assert order == ["read"]
        assert worker._ahead is None
        return
    steps = min(8, 64 - committed_len % 64 - 8)
    assert order == [f"{steps} more", "read"]
    ahead = worker._ahead.for_batch([state])
    assert ahead.is_plain
    assert len(ahead.made.deliver()[0]) == steps
    # Where the batch has changed meanwhile, the CPU has a say again.
    ahead.states = [state, request_state("new")]
    batch.reqs *= 2
    assert worker._go_on(batch, ahead.states, ahead) is None
