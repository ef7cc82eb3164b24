"""The prefix caches of two ranks under the same random requests: their tiers drift apart, and what
SGLang sees of them does not."""

from __future__ import annotations

import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_kvspec.runtime.agreed_prefixes import AgreedPrefixes
from sglang_kvspec.runtime.ranks import Ranks

SIZE = 32
NUM_PAGES = 10
NUM_REQUESTS = 3
BOTH = (0, 1)


class Meeting:
    """Where two ranks, each in a thread of its own, exchange what they have."""

    def __init__(self):
        self.barrier = threading.Barrier(len(BOTH))
        self.brought = {}
        self.num_messages = 0

    def exchange(self, rank, about, mine):
        """What both have; about: equal on both."""
        self.brought[rank] = about, mine
        self.barrier.wait()
        abouts, both = zip(*(self.brought[rank] for rank in BOTH), strict=True)
        self.barrier.wait()
        assert abouts[0] == abouts[1], "ranks do different things"
        return both


class MeetingRanks(Ranks):
    def __init__(self, rank, meeting):
        super().__init__(rank, len(BOTH))
        self.meeting = meeting

    def least(self, mine, about):
        self.meeting.num_messages += self.is_first
        both = self.meeting.exchange(self.rank, repr(about), list(mine))
        return [min(pair) for pair in zip(*both, strict=True)]


def choosing(rank, which):
    """In place of what hypothesis draws from."""
    return SimpleNamespace(draw=lambda _: rank.running[which % len(rank.running)])


class TwoRanks(RuleBasedStateMachine):
    prompts = st.lists(st.integers(0, 1), max_size=4).map(tuple)
    salts = st.sampled_from([None, "salt"])

    def __init__(self, machine, make_kv):
        super().__init__()
        self.meeting = Meeting()
        # Host memory of the second rank has room for fewer residuals, and its memory for anchors.
        self.ranks = [
            machine(
                make_kv,
                residual_share=(1.0, 0.4)[rank],
                num_kept=(0, 3)[rank],
                ranks=MeetingRanks(rank, self.meeting),
            )
            for rank in BOTH
        ]
        self.pool = ThreadPoolExecutor(len(BOTH))

    def teardown(self):
        self.pool.shutdown()
        for rank in self.ranks:
            rank.teardown()

    def do(self, act):
        """The same on both ranks, at the same time."""

        def run(rank):
            try:
                act(rank)
                self.meeting.exchange(rank.ranks.rank, "done", None)
            except BaseException:
                # Nobody comes to meet the other any more.
                self.meeting.barrier.abort()
                raise

        done = [self.pool.submit(run, rank) for rank in self.ranks]
        errors = [error for future in done if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error

    # What the scheduler does on every rank

    @precondition(lambda self: len(self.ranks[0].running) < NUM_REQUESTS)
    @rule(prompt=prompts, rest=st.integers(1, SIZE), salt=salts)
    def admit(self, prompt, rest, salt):
        self.do(lambda rank: rank.admit(prompt, rest, salt))

    @precondition(lambda self: self.ranks[0].running)
    @rule(which=st.integers(0, NUM_REQUESTS - 1))
    def cache_unfinished(self, which):
        self.do(lambda rank: rank.cache_unfinished(choosing(rank, which)))

    @precondition(lambda self: self.ranks[0].running)
    @rule(which=st.integers(0, NUM_REQUESTS - 1), is_insert=st.booleans())
    def finish(self, which, is_insert):
        self.do(lambda rank: rank.finish(choosing(rank, which), is_insert, False))

    @rule(num_pages=st.integers(1, NUM_PAGES))
    def evict(self, num_pages):
        self.do(lambda rank: rank.evict(num_pages))

    @precondition(lambda self: not self.ranks[0].running)
    @rule()
    def flush(self):
        self.do(lambda rank: rank.flush())

    @rule()
    def die_and_start_again(self):
        self.do(lambda rank: rank.start_process())

    # What happens to one of them

    @rule(rank=st.sampled_from(BOTH))
    def write(self, rank):
        self.ranks[rank].write()

    @rule(rank=st.sampled_from(BOTH))
    def refuse(self, rank):
        """Its queue for the disk is full until it starts again."""
        self.ranks[rank].disk.put = lambda *args: False

    @rule(rank=st.sampled_from(BOTH), record=st.integers(0, 7), part=st.integers(0, 1))
    def damage(self, rank, record, part):
        machine = self.ranks[rank]
        page = machine.kv.plan.page_bytes
        name, num_bytes = (("anchors", page.anchor), ("residuals", page.residual))[part]
        path = machine.folder / f"{name}.data"
        if path.stat().st_size < (record + 1) * num_bytes:
            return
        with path.open("r+b") as file:
            file.seek(record * num_bytes)
            (byte,) = file.read(1)
            file.seek(record * num_bytes)
            file.write(bytes([byte ^ 1]))

    # What must hold

    @invariant()
    def sglang_sees_the_same(self):
        first, second = self.ranks
        assert first.allocator.free_pages.tolist() == second.allocator.free_pages.tolist()
        assert first.hits == second.hits
        for one, other in zip(first.running, second.running, strict=True):
            assert one.prefix_indices.tolist() == other.prefix_indices.tolist()
            assert one.cache_protected_len == other.cache_protected_len
        assert first.tree.total_size() == second.tree.total_size()

    @invariant()
    def every_rank_is_whole(self):
        for rank in self.ranks:
            rank.no_page_is_lost()
            rank.pools_are_consistent()


@pytest.fixture
def run_both(run_machine, prefix_cache_machine):
    def run(steps, **options):
        run_machine(partial(TwoRanks, prefix_cache_machine), steps, **options)

    return run


def test_ranks_whose_tiers_drift_stay_together(run_both):
    run_both(30, max_examples=40)


def test_the_machine_finds_ranks_that_look_up_alone(run_both, monkeypatch):
    def num_loadable(agreed, wanted):
        return [agreed._tiers.num_loadable(links) for links in wanted]

    monkeypatch.setattr(AgreedPrefixes, "num_loadable", num_loadable)
    with pytest.raises(AssertionError):
        run_both(30, max_examples=400, phases=[Phase.generate])


@pytest.fixture
def both(make_kv, prefix_cache_machine):
    machine = TwoRanks(prefix_cache_machine, make_kv)
    yield machine
    machine.teardown()


def test_a_page_that_one_rank_cannot_read_is_computed_by_both(both):
    """A scripted run, which shows that the machine gets there."""
    both.admit((0, 1, 0), 5, None)
    both.finish(0, True)
    for rank in BOTH:
        both.write(rank)
    both.flush()
    both.damage(1, 1, 0)
    both.admit((0, 1, 0), 5, None)
    both.sglang_sees_the_same()
    both.every_rank_is_whole()
    # Both parts of each were found, so that both ranks took pages for them and gave two back.
    assert [rank.hits["disk"] for rank in both.ranks] == [SIZE] * 2
    counters = [rank.disk.counters for rank in both.ranks]
    assert [each.damaged_anchors for each in counters] == [0, 1]


def test_ranks_that_load_alone_are_found(both, monkeypatch):
    def load(agreed, links, pages):
        return agreed._tiers.load(links, pages)

    monkeypatch.setattr(AgreedPrefixes, "load", load)
    with pytest.raises(AssertionError):
        test_a_page_that_one_rank_cannot_read_is_computed_by_both(both)


def test_ranks_agree_on_many_requests_in_one_message(both):
    """And on none where no page can be below the tree, or outside of the scheduler's pass."""
    both.admit((0, 1, 0), 5, None)
    both.finish(0, True)
    both.evict(NUM_PAGES)
    prompts = [[0] * SIZE + [1] * SIZE + [i] for i in range(2, 20)]

    def looked_up(rank, in_pass):
        requests = [request_of(tokens) for tokens in prompts]

        def look_up(req):
            key = RadixKey(req.origin_input_ids, None)
            params = MatchPrefixParams(key=key, req=req)
            return rank.tree.match_prefix(params).host_hit_length

        if not in_pass:
            return [look_up(req) for req in requests]
        with rank.tree.in_pass(lambda: requests):
            return [look_up(req) for req in [*requests, *requests]]

    def check(in_pass, expected, num_messages):
        before, found = both.meeting.num_messages, {}
        both.do(lambda rank: found.update({rank: looked_up(rank, in_pass)}))
        assert list(found.values()) == [expected] * 2
        assert both.meeting.num_messages - before == num_messages

    check(True, [2 * SIZE] * 36, num_messages=2)
    check(False, [0] * 18, num_messages=0)
    prompts = [[i] for i in range(18)]
    check(True, [0] * 36, num_messages=0)


def request_of(tokens):
    return SimpleNamespace(
        rid=str(tokens),
        origin_input_ids=array("q", tokens),
        output_ids=array("q"),
        extra_key=None,
        positional_embed_overrides=None,
    )
