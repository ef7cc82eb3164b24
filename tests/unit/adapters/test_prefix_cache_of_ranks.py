"""The prefix caches of two ranks under the same random requests. The content of their tiers drifts
apart, but SGLang sees the same hits on both."""

from __future__ import annotations

from array import array
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import Phase
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvspec_testkit.runtime.rank_exchange import BOTH
from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache
from sglang_kvspec.runtime.common_prefixes import CommonPrefixes

SIZE = 32
NUM_PAGES = 10


@pytest.fixture
def run_both(run_machine, two_ranks, prefix_cache_machine):
    def run(steps, **options):
        run_machine(partial(two_ranks, prefix_cache_machine), steps, **options)

    return run


def test_ranks_whose_tiers_drift_stay_together(run_both):
    run_both(30, max_examples=40)


def test_the_machine_finds_ranks_that_look_up_alone(run_both, monkeypatch):
    def num_loadable(common, wanted):
        return [common._tiers.num_loadable(links) for links in wanted]

    monkeypatch.setattr(CommonPrefixes, "num_loadable", num_loadable)
    with pytest.raises(AssertionError):
        run_both(30, max_examples=400, phases=[Phase.generate])


@pytest.fixture
def both(make_kv, two_ranks, prefix_cache_machine):
    machine = two_ranks(prefix_cache_machine, make_kv)
    yield machine
    machine.teardown()


def test_a_page_that_one_rank_cannot_read_is_computed_by_both(both):
    """A scripted run, which shows that the machine reaches this case."""
    both.admit((0, 1, 0), 5, None)
    both.finish(0, True)
    for rank in BOTH:
        both.write(rank)
    both.flush()
    both.damage(1, 1, 0)
    both.admit((0, 1, 0), 5, None)
    both.sglang_sees_the_same()
    both.every_rank_is_whole()
    # Both ranks found three pages and took pages for them. They gave two back.
    assert [rank.hits["disk"] for rank in both.ranks] == [SIZE] * 2
    counters = [rank.disk.counters for rank in both.ranks]
    assert [each.damaged_anchors for each in counters] == [0, 1]


def test_ranks_that_load_alone_are_found(both, monkeypatch):
    def load(common, links, pages):
        return common._tiers.load(links, pages)

    monkeypatch.setattr(CommonPrefixes, "load", load)
    with pytest.raises(AssertionError):
        test_a_page_that_one_rank_cannot_read_is_computed_by_both(both)


def test_ranks_agree_on_many_requests_in_one_message(both):
    """No message is sent where no page can be below the tree, or outside the scheduler's pass."""
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
        before, found = both.rank_exchange.num_messages, {}
        both.do(lambda rank: found.update({rank: looked_up(rank, in_pass)}))
        assert list(found.values()) == [expected] * 2
        assert both.rank_exchange.num_messages - before == num_messages

    check(True, [2 * SIZE] * 36, num_messages=2)
    check(False, [0] * 18, num_messages=0)
    prompts = [[i] for i in range(18)]
    check(True, [0] * 36, num_messages=0)


def test_links_of_a_waiting_request_are_made_once(both, monkeypatch):
    made = []
    right = KVSpecRadixCache._links

    def links(cache, key, skip=0):
        made.append(len(key))
        return right(cache, key, skip)

    monkeypatch.setattr(KVSpecRadixCache, "_links", links)
    waiting = [[request_of([i] * 2 * SIZE + [7]) for i in (3, 4)] for _ in BOTH]

    def a_pass(num_made, queues=waiting):
        made.clear()

        def look_up(rank):
            queue = queues[rank.ranks.rank]
            with rank.tree.in_pass(lambda: queue):
                for req in queue:
                    tokens = [*req.origin_input_ids, *req.output_ids]
                    key = RadixKey(array("q", tokens), None)
                    rank.tree.match_prefix(MatchPrefixParams(key=key, req=req))

        both.do(look_up)
        assert len(made) == 2 * num_made

    a_pass(2)
    a_pass(0)
    for queue in waiting:
        # The request was retracted, and has one more page.
        queue[0].output_ids.extend([5] * SIZE)
    a_pass(1)
    a_pass(1, queues=[[request_of([9] * 2 * SIZE + [7])] for _ in BOTH])
    # Requests that had left the queue count as new.
    a_pass(2)


def request_of(tokens):
    return SimpleNamespace(
        rid=str(tokens),
        origin_input_ids=array("q", tokens),
        output_ids=array("q"),
        extra_key=None,
        cache_salt=None,
        positional_embed_overrides=None,
    )
