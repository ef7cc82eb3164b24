"""Admission and retraction of requests: page budgets, no retraction storms, priorities, and an end
for every request."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.planning.admission import Admission, PageNeed
from sglang_kvspec.planning.retraction import RetractionView, keep_order

PAGE, RESERVE, HEADROOM = 16, 10, 24
RULE = Admission(PAGE, RESERVE, HEADROOM)


def pages(num_tokens):
    return -(-num_tokens // PAGE)


@dataclass(eq=False)
class Request:
    """A request of the simulation. added: tokens since the last time that any request started."""

    prompt: int
    max_new: int
    actual_new: int
    priority: int = 0
    output: int = 0
    held: int = 0
    added: int = 0
    retractions: int = 0

    @property
    def need(self):
        return PageNeed(self.held, self.prompt + self.output, self.max_new - self.output)

    @property
    def view(self):
        # The place of residuals is as random as the prompt.
        far = self.prompt % 3
        return RetractionView(self.priority, self.retractions, far, 1, self.output, self.prompt)


@dataclass
class Server:
    """The page accounting of SGLang's loop, which starts one request at a time from the head of its
    queue. A request adds any number of tokens up to the slots that it has for them."""

    num_pages: int
    rng: random.Random
    waiting: list[Request]
    running: list[Request] = field(default_factory=list)
    num_retractions: int = 0
    rule: Admission = RULE

    @property
    def free(self):
        return self.num_pages - sum(r.held for r in self.running)

    def start_waiting(self):
        self.waiting.sort(key=lambda r: -r.priority)
        starting: list[Request] = []
        while self.waiting:
            others = [r.need for r in (*self.running, *starting)]
            if not self.rule.has_room(self.waiting[0].need, others, self.free):
                break
            starting.append(self.waiting.pop(0))
        for request in starting:
            request.held = pages(request.prompt + request.output)
            self.running.append(request)
        if starting:
            for request in self.running:
                request.added = 0

    def missing(self):
        return {r: max(pages(r.need.num_tokens + RESERVE) - r.held, 0) for r in self.running}

    def retract(self):
        """Retract requests as ScheduleBatch.retract_decode does, until the others can continue."""
        order = [self.running[i] for i in keep_order([r.view for r in self.running])]
        while sum(self.missing().values()) > self.free and len(self.running) > 1:
            assert max(r.added for r in self.running) > self.rule.headroom_tokens, "a storm"
            victim = order.pop()
            self.running.remove(victim)
            for kept in self.running:
                assert victim.priority <= kept.priority
                if victim.priority == kept.priority:
                    assert victim.retractions <= kept.retractions
            victim.held, victim.retractions = 0, victim.retractions + 1
            self.num_retractions += 1
            self.waiting.append(victim)

    def step(self):
        self.start_waiting()
        self.retract()
        for request, num_pages in self.missing().items():
            request.held += num_pages
        assert self.free >= 0, "more pages than there are"
        for request in list(self.running):
            num_new = min(self.rng.randint(1, RESERVE), request.actual_new - request.output)
            request.output += num_new
            request.added += num_new
            if request.output == request.actual_new:
                self.running.remove(request)

    @property
    def is_idle(self):
        return not self.running and not self.waiting


def run(server):
    while not server.is_idle:
        server.step()


@st.composite
def bursts(draw):
    sizes = st.tuples(
        st.integers(1, 120), st.integers(1, 120), st.floats(0.1, 1.0), st.integers(0, 2)
    )
    requests = [
        Request(prompt, most, max(1, int(most * share)), priority)
        for prompt, most, share, priority in draw(st.lists(sizes, min_size=1, max_size=24))
    ]
    # The largest request fits alone, which SGLang ensures.
    least = max(pages(r.prompt + r.max_new + RESERVE) for r in requests)
    return requests, draw(st.integers(least, 3 * least)), draw(st.integers(0, 2**16))


@settings(max_examples=300, deadline=None)
@given(bursts())
def test_all_requests_finish_within_pages_and_without_storms(burst):
    requests, num_pages, seed = burst
    server = Server(num_pages, random.Random(seed), list(requests))
    # At least one request adds a token in every iteration, and a retraction keeps emitted tokens.
    for _ in range(sum(request.actual_new for request in requests)):
        server.step()
        if server.is_idle:
            break
    assert server.is_idle, "somebody starves"
    assert all(request.output == request.actual_new for request in requests)


@settings(max_examples=100, deadline=None)
@given(bursts())
def test_with_headroom_for_whole_answers_no_request_is_retracted(burst):
    requests, num_pages, seed = burst
    rule = Admission(PAGE, RESERVE, headroom_tokens=1000)
    server = Server(num_pages, random.Random(seed), list(requests), rule=rule)
    run(server)
    assert server.num_retractions == 0


def test_without_the_rule_there_are_storms():
    """Requests that start as soon as their prompts fit make the loop fail."""

    class Eager(Admission):
        def has_room(self, request, others, free_pages):
            asked = sum(max(pages(n.num_tokens) - n.held_pages, 0) for n in (request, *others))
            return asked <= free_pages

    rule = Eager(PAGE, RESERVE, HEADROOM)
    requests = [Request(40, 100, 100) for _ in range(20)]
    server = Server(30, random.Random(0), requests, rule=rule)
    with pytest.raises(AssertionError, match="a storm"):
        run(server)


def test_a_request_needs_room_for_its_prompt_its_next_tokens_and_its_drafts():
    # 64 + 24 + 10 tokens: seven pages.
    request = PageNeed(0, 64, 100)
    assert RULE.missing(request) == 7
    # Two of these pages are cached.
    assert RULE.missing(PageNeed(2, 64, 100)) == 5
    # The request ends before it has added its headroom.
    assert RULE.missing(PageNeed(0, 64, 3)) == 5
    assert RULE.missing(PageNeed(9, 64, 100)) == 0
    running = PageNeed(5, 70, 50)
    assert RULE.missing(running) == 2
    assert RULE.has_room(request, [running], 9)
    assert not RULE.has_room(request, [running], 8)


def test_the_first_request_always_starts():
    assert RULE.has_room(PageNeed(0, 10_000, 100), [], 1)


def view(priority=0, num_retractions=0, far=0, near=4, output=10, prompt=100):
    return RetractionView(priority, num_retractions, far, near, output, prompt)


@pytest.mark.parametrize(
    ("kept", "retracted"),
    [
        (view(priority=1, far=4, near=0), view()),
        (view(num_retractions=1, far=4, near=0), view(output=1000)),
        (view(far=2), view(far=5, output=1000)),
        (view(output=11), view(output=10)),
        (view(prompt=99), view(prompt=100)),
    ],
    ids=["priority", "retracted before", "residuals near", "more output", "shorter prompt"],
)
def test_the_order_of_retraction(kept, retracted):
    assert keep_order([kept, retracted]) == [0, 1]
    assert keep_order([retracted, kept]) == [1, 0]
