"""Draft lengths and turns to verify together, in simulated time: the policy of a GPU server with
residuals in host memory, compared with policies that know more.

Times are those of an 8B shape with 16 requests of 32K tokens on an H200. Pages are ten times as
large, so that there are fewer of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

import pytest

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.planning import round_step
from sglang_kvspec.planning.draft_length import AcceptanceEstimate
from sglang_kvspec.planning.link_rounds import plan_turns, share_of_speed
from sglang_kvspec.planning.round_cost_model import RoundCostModel
from sglang_kvspec.planning.round_plan import CacheView, RoundBudget, RoundPlan, RoundView
from sglang_kvspec.planning.round_step import RoundPlanner
from sglang_kvspec.planning.rounds import RoundCost, RoundRequest, plan_round

CAP_LEN = KVSpecConfig(host_gb=1).max_draft_len
# A lower cap, set by a user: the work between verifications then counts for more.
SHORT_CAP_LEN = 31
# Chance that a draft is accepted if those before it are. On average 27 of 32 are accepted, as
# measured.
PROBABILITY = 0.99
NUM_REQUESTS, PAGES_EACH, CONTEXT = 16, 52, 32768.0
ALL_PAGES = NUM_REQUESTS * PAGES_EACH
COST = RoundCost(step=4.5e-3, row=0.37e-3, request=0.33e-3, token=0.02e-3)
PAGES_PER_S = 50e9 / 2**21 / 10
# Seconds of the CPU: for a verification, for each page that moves, and between rounds.
ENQUEUE_S, PAGE_S, BETWEEN_S = 15e-3, 0.02e-3, 2e-3
FIRST_DRAFT_LEN = 8
# Measured seconds: a verification without attention, and the attention of one of 16 requests with a
# few tokens each. If the widest part has at most so many tokens, every part costs NARROW_S. If it
# has more, all parts together cost START_S, and each block of a part's tokens BLOCK_S by its width.
FORWARD_S, REQUEST_S = 4.5e-3, 0.72e-3
NARROW_S = {8: 0.7e-3, 16: 1.2e-3}
START_S, BLOCK_S, BLOCK_TOKENS = 0.55e-3, {16: 1.05e-3, 32: 1.6e-3}, 32
PAGE_TOKENS = 64


@dataclass
class Simulated:
    """A server that plays one round at a time. fixed: drafts of each request in every round, if
    given."""

    cache_pages: int
    fixed: int | None = None
    # Seconds to enqueue the first round's verification.
    first_s: float = ENQUEUE_S
    pages_per_s: float = PAGES_PER_S
    cap_len: int = CAP_LEN
    request_reads: float = COST.request / COST.row
    now: float = 0.0
    tokens: int = 0
    link_free_at: float = 0.0
    arrival: dict[int, float] = field(default_factory=dict)

    def __post_init__(self):
        self._rng = random.Random(0)
        self._pages = [range(i * PAGES_EACH, (i + 1) * PAGES_EACH) for i in range(NUM_REQUESTS)]
        # The prompts that arrived last were encoded last, so their pages are cached.
        fitting = self.cache_pages // PAGES_EACH
        self._cached = {p for own in self._pages[NUM_REQUESTS - fitting :] for p in own}
        self._drafts = [0] * NUM_REQUESTS
        self._estimates = [AcceptanceEstimate() for _ in range(NUM_REQUESTS)]
        self._planner = RoundPlanner()
        self._clock = RoundCostModel(COST.step, self.request_reads, piggyback=True)
        self.lens: list[int] = []

    def round(self):
        cost = self._clock.cost(CONTEXT)
        lens = self.lens = self._draft_lens(cost)
        plan = self._plan(lens, cost)
        self._cached.difference_update(plan.evict)
        for pages in (plan.fetch, plan.ahead):
            self._fetch(pages)
        assert len(self._cached) <= self.cache_pages
        self._drafts = [a + b for a, b in zip(self._drafts, lens, strict=True)]
        draft_s = COST.step * max(lens) + COST.row * sum(lens)
        drafted_at = self.now + draft_s
        wait_s = max(0.0, self._arrived(plan) - drafted_at)
        verified = [self._drafts[i] for i in plan.verify]
        known = self.first_s if not self.tokens else ENQUEUE_S
        enqueue_s = known + PAGE_S * (len(plan.fetch) + len(plan.ahead))
        end = drafted_at + wait_s
        beside = [i for i in range(NUM_REQUESTS) if i not in plan.verify and self._has_room(i)]
        if verified:
            end += self._verify_s(verified) + COST.row * len(beside)
            end = max(end, self.now + enqueue_s)
            for i in beside:
                self._drafts[i] += 1
        self._verify(plan.verify)
        times = (draft_s, end - drafted_at - wait_s, enqueue_s)
        num_piggyback = len(beside) if verified else 0
        self._clock.observe(lens, CONTEXT, *times, verified, BETWEEN_S, num_piggyback)
        self.now = end + BETWEEN_S

    def _verify_s(self, verified):
        """Return the seconds of a verification. verified: drafts of each request."""
        tokens = sum(verified) + len(verified)
        return COST.step + COST.request * len(verified) + COST.token * tokens

    def _has_room(self, i):
        return self._drafts[i] < self.cap_len

    def _draft_lens(self, cost):
        rooms = [self.cap_len - drafts for drafts in self._drafts]
        if self.fixed is not None:
            return [min(self.fixed, room) for room in rooms]
        if not self._clock.has_measured:
            return [min(FIRST_DRAFT_LEN, room) for room in rooms]
        requests = [
            RoundRequest(estimate.probability, self.cap_len, drafts)
            for estimate, drafts in zip(self._estimates, self._drafts, strict=True)
        ]
        turns = self._planner.turns(self.pages_per_s)
        if turns is None:
            return plan_round(requests, cost)
        return plan_turns(requests, cost, turns).lens

    def link_share(self):
        requests = [RoundRequest(e.probability, self.cap_len, 0) for e in self._estimates]
        room = self._planner.room(self.pages_per_s)
        return share_of_speed(requests, self._clock.cost(CONTEXT), *room)

    def _plan(self, lens, cost):
        keys = [str(i) for i in range(NUM_REQUESTS)]
        if len(self._cached) == ALL_PAGES:
            self._planner.all_verify(keys)
            return RoundPlan(tuple(range(NUM_REQUESTS)))
        drafting_s = cost.step * max(lens) + cost.row * sum(lens)
        seconds = (drafting_s, cost.seconds(lens))
        views = [
            RoundView(
                key,
                tuple(p for p in own if p not in self._cached),
                tuple(p for p in own if p in self._cached),
            )
            for key, own in zip(keys, self._pages, strict=True)
        ]
        free = self.cache_pages - len(self._cached)
        return self._planner.plan(
            views,
            CacheView(self.cache_pages, free, tuple(self._cached)),
            RoundBudget(*(int(s * self.pages_per_s) for s in seconds)),
            drafts=any(lens),
        )

    def _fetch(self, pages):
        if pages:
            begun = max(self.link_free_at, self.now)
            self.link_free_at = begun + len(pages) / self.pages_per_s
            self.arrival |= dict.fromkeys(pages, self.link_free_at)
            self._cached.update(pages)

    def _arrived(self, plan):
        pages = (page for i in plan.verify for page in self._pages[i])
        return max((self.arrival.get(page, 0.0) for page in pages), default=0.0)

    def _verify(self, indices):
        for i in indices:
            luck = self._rng.random()
            accepted = sum(luck < PROBABILITY**j for j in range(1, self._drafts[i] + 1))
            self._estimates[i].observe(self._drafts[i], accepted)
            self._drafts[i] = 0
            self.tokens += accepted + 1


@dataclass
class Profiled(Simulated):
    """A server whose verifications cost what the measured kernel takes, which differs from the cost
    model. A request whose tokens lie on two pages has two parts, and parts cost what blocks of
    their tokens do. If all requests verify at once, the reads of each count."""

    request_reads: float = 2.0

    def __post_init__(self):
        super().__post_init__()
        self._places = random.Random(1)

    def _verify_s(self, verified):
        if len(verified) == NUM_REQUESTS:
            return FORWARD_S + REQUEST_S * NUM_REQUESTS
        parts = [part for drafts in verified for part in self._parts(drafts + 1)]
        most = max(parts)
        for tokens, seconds in NARROW_S.items():
            if most <= tokens:
                return FORWARD_S + seconds * len(parts)
        return FORWARD_S + START_S + sum(map(_blocks_s, parts))

    def _parts(self, tokens):
        on_first = self._places.randrange(1, PAGE_TOKENS + 1)
        return [part for part in (min(tokens, on_first), tokens - on_first) if part > 0]


def _blocks_s(tokens):
    whole, rest = divmod(tokens, BLOCK_TOKENS)
    widths = [BLOCK_TOKENS] * whole + [rest] * (rest > 0)
    return sum(next(s for most, s in BLOCK_S.items() if width <= most) for width in widths)


@cache
def rate(
    cache_pages,
    fixed=None,
    pages_per_s=PAGES_PER_S,
    rounds=120,
    warm_up=40,
    cap_len=CAP_LEN,
    kind=Simulated,
):
    """Return tokens a second, after a warm-up."""
    simulated = kind(cache_pages, fixed, pages_per_s=pages_per_s, cap_len=cap_len)
    for _ in range(warm_up):
        simulated.round()
    tokens, begun = simulated.tokens, simulated.now
    for _ in range(rounds):
        simulated.round()
    return (simulated.tokens - tokens) / (simulated.now - begun)


def mean_rate(caches, *args, **kwargs):
    """Return the mean rate over caches of these sizes, since a few pages change how well turns
    fit."""
    return fmean(rate(pages, *args, **kwargs) for pages in caches)


def best_fixed_rate(cache_pages, pages_per_s):
    fixed = (2, 4, 6, 8, 10, 12, 16, 24)
    return max(rate(cache_pages, length, pages_per_s) for length in fixed)


@pytest.mark.parametrize("link", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("share", [0.2, 0.37, 0.65])
def test_auto_comes_near_the_best_fixed_length(share, link):
    where = (int(share * ALL_PAGES), PAGES_PER_S * link)
    assert rate(where[0], None, where[1]) >= 0.9 * best_fixed_rate(*where)


def test_a_third_of_the_cache_keeps_most_of_the_speed():
    assert rate(int(0.37 * ALL_PAGES)) >= 0.86 * rate(ALL_PAGES)


def test_a_quarter_of_the_cache_keeps_the_link_busy():
    caches = range(int(0.235 * ALL_PAGES), int(0.29 * ALL_PAGES), 4)
    assert mean_rate(caches) >= 0.82 * rate(ALL_PAGES)


@pytest.mark.parametrize("share", [0.15, 0.2, 0.25, 0.3])
def test_longer_drafts_make_more_of_every_fetch(share):
    pages = [int(share * ALL_PAGES) + more for more in (0, 6, 12)]
    assert mean_rate(pages, cap_len=CAP_LEN) > mean_rate(pages, cap_len=SHORT_CAP_LEN)


@pytest.mark.parametrize("link", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cached", [0.2, 0.25, 0.37, 0.65])
def test_the_predicted_rate_of_the_link_is_about_what_is_reached(cached, link):
    pages, pages_per_s = int(cached * ALL_PAGES), PAGES_PER_S * link
    simulated = Simulated(pages, pages_per_s=pages_per_s)
    said = []
    for number in range(160):
        simulated.round()
        if number >= 40:
            said.append(simulated.link_share().share)
    mean = sum(said) / len(said)
    reached = rate(pages, None, pages_per_s) / rate(ALL_PAGES)
    # The estimate assumes a link that is always busy. Turns do not always fit that well.
    assert 0.85 * mean < reached < 1.03 * mean


def profiled_rate(fixed=None):
    """Return the rate where the cache holds about a quarter of the residuals."""
    caches = range(int(0.25 * ALL_PAGES), int(0.28 * ALL_PAGES), 5)
    return mean_rate(caches, fixed, kind=Profiled)


def test_a_profiled_server_keeps_what_was_measured():
    """Measured: 0.82 of the speed with all residuals in the cache, and 0.80 with a slightly slower
    kernel. That speed is 1363 +- 47 tokens a second. A point has a spread of 0.05 or more."""
    resident = rate(ALL_PAGES, kind=Profiled)
    assert 1316 < resident < 1410
    assert 0.77 < profiled_rate() / resident < 0.87


def test_no_other_length_would_make_a_profiled_server_much_quicker():
    best = max(profiled_rate(length) for length in (2, 3, 4, 5, 6, 8, 10))
    assert profiled_rate() >= 0.96 * best


def test_a_slow_first_round_does_not_stop_drafting():
    """The first round, in which kernels load and compile, may take longer than all later ones."""
    simulated = Simulated(int(0.37 * ALL_PAGES), first_s=1.0)
    for _ in range(20):
        simulated.round()
        assert any(simulated.lens)


def test_lengths_without_regard_to_the_link_fail_the_comparison(monkeypatch):
    where = (int(0.5 * ALL_PAGES), 0.5 * PAGES_PER_S)
    monkeypatch.setattr(RoundPlanner, "turns", lambda *_: None)
    assert rate.__wrapped__(where[0], None, where[1]) < 0.8 * best_fixed_rate(*where)


def test_a_cache_that_half_the_requests_keep_fails_the_comparison(monkeypatch):
    where = (int(0.2 * ALL_PAGES), None, 0.5 * PAGES_PER_S)
    sound = rate(*where, cap_len=SHORT_CAP_LEN)
    monkeypatch.setattr(round_step, "FETCH_SHARE", 0.2)
    assert rate.__wrapped__(*where, cap_len=SHORT_CAP_LEN) < 0.85 * sound


def test_a_link_that_waits_for_room_fails_the_comparison(monkeypatch):
    monkeypatch.setattr(round_step, "ROUNDS_TO_FILL", 0)
    found = rate.__wrapped__(int(0.25 * ALL_PAGES), cap_len=SHORT_CAP_LEN)
    assert found < 0.75 * rate(ALL_PAGES)


def test_a_cost_without_the_cpu_fails_the_check(monkeypatch):
    """Rounds without drafts then seem to cost only what their kernels take."""
    simulated = Simulated(int(0.37 * ALL_PAGES), first_s=1.0)
    seconds = RoundCost.seconds

    def without_enqueuing(cost, lens, num_verify=None):
        floor = cost.enqueue + cost.between if any(lens) else 0.0
        bare = RoundCost(cost.step, cost.row, cost.request, cost.token)
        return max(seconds(bare, lens, num_verify), floor)

    monkeypatch.setattr(RoundCost, "seconds", without_enqueuing)
    idle = 0
    for _ in range(20):
        simulated.round()
        idle += not any(simulated.lens)
    assert idle >= 3
