"""The prefix cache under random requests of which some start on anchors. No other request reads
their pages before residuals have arrived, and no page is lost."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache
from sglang_kvspec.kv.page_records import copy_out
from sglang_kvspec.kv.prefix_store import page_rows
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.runtime.remote_prefixes import EarlyStarts
from sglang_kvspec.runtime.remote_prefixes.counters import RemoteCounters
from sglang_kvspec.runtime.remote_prefixes.lookups import LandedPage

SIZE = 32
NUM_REQUESTS = 3


class Remote:
    """Remote tier that has every page's anchor. record_of: link -> (anchor, residual). whole: keys
    of pages whose residuals have arrived."""

    def __init__(self, record_of):
        self.record_of, self.whole, self.counters = record_of, set(), RemoteCounters()

    def anchor_of(self, link):
        return self.record_of(link)[0]

    def find(self, link):
        return LandedPage(link, *self.record_of(link)) if link.key in self.whole else None

    def is_awaited(self, rid):
        return True

    # Methods of a prefix tier

    def num_landed(self, links):
        return next((i for i, link in enumerate(links) if link.key not in self.whole), len(links))

    def read(self, link, anchor, residual):
        if link.key not in self.whole:
            return False
        anchor[:], residual[:] = self.record_of(link)
        return True

    def first_to_publish(self, links):
        return len(links)

    def put(self, link, anchor, residual):
        raise AssertionError("nothing is published")


@pytest.fixture(scope="module")
def early_machine(prefix_cache_machine):
    class EarlyMachine(prefix_cache_machine):
        """One rank, with a prefix server."""

        def __init__(self, make_kv):
            self.scratch = make_kv(num_pages=1)
            super().__init__(make_kv, residual_share=1.0)

        def start_process(self):
            super().start_process()
            self.starts_early = False
            self.remote = self.tiers._remote = Remote(self.record_of)
            self.early = self.tree.early = EarlyStarts(
                self.kv, self.remote, self.tiers.count_loaded
            )
            self.allocator._kvcache.freed_listeners.append(self.early.release)
            self.tree.in_pass = self.in_pass

        def record_of(self, link):
            self.compute(self.scratch, 1, link)
            records = copy_out(self.scratch, [1])
            self.scratch.free_pages([1])
            return tuple(bytearray(page_rows(part)[0]) for part in records)

        def compute(self, kv, page, link):
            k, v = self.content(link)
            kv.write_whole([page], k[None, None], v[None, None])

        @contextmanager
        def in_pass(self, queue):
            """Let the request that is about to be admitted start early, if the machine says so."""
            (req,) = queue()
            self.tree._starting = req if self.starts_early else None
            yield

        def check_content(self, req, slots):
            pages = (slots[::SIZE] // SIZE).tolist()
            pending = self.kv.residuals.table.pages_in(pages, ResidualState.IN_FLIGHT)
            assert bool(pending) == self.early.has_pending_residuals(req.rid)
            if not pending:
                super().check_content(req, slots)

        def is_apart(self, req):
            return req.rid in self.early.rids

        @precondition(lambda self: len(self.running) < NUM_REQUESTS)
        @rule(
            prompt=prefix_cache_machine.prompts,
            rest=st.integers(1, SIZE),
            salt=prefix_cache_machine.salts,
        )
        def start(self, prompt, rest, salt):
            """Start a request on anchors, or as any other if there are no usable anchors."""
            if any(self.is_apart(req) for req in self.running):
                return
            num_before = len(self.running)
            self.starts_early = True
            self.admit(prompt, rest, salt)
            self.tree._starting, self.starts_early = None, False
            if len(self.running) == num_before:
                return
            req = self.running[-1]
            self.tree.detach(req)
            req.set_extend_range = partial(self.set_extend_range, req)
            num_cached = len(self.prefix_of(req))
            req.set_extend_range(num_cached, len(req.full_untruncated_fill_ids))
            req.get_fill_ids = lambda: req.full_untruncated_fill_ids[: req.extend_range.end]

        @staticmethod
        def set_extend_range(req, start, end):
            req.extend_range = SimpleNamespace(start=start, end=end)

        @rule(num_pages=st.integers(1, 4))
        def residuals_come(self, num_pages):
            for req in filter(self.is_apart, self.running):
                pending = list(self.early._starts[req.rid].pending.values())
                self.remote.whole.update(link.key for link, _ in pending[:num_pages])
            complete, lost = self.early.land()
            assert not lost
            for req in self.running:
                if req.rid in complete:
                    self.tree.adopt(req)
                    self.check_content(req, self.prefix_of(req))
            self.remote.whole.clear()

        @precondition(lambda self: not all(map(self.is_apart, self.running)))
        @rule(data=st.data())
        def cache_unfinished(self, data):
            whole = [req for req in self.running if not self.is_apart(req)]
            self.cache(data.draw(st.sampled_from(whole)))

    return EarlyMachine


def test_every_hit_reads_the_kv_of_its_tokens(run_machine, early_machine):
    run_machine(early_machine, 30, max_examples=40)


def choosing(req):
    """Return a stand-in for hypothesis's data, which draws a given request."""
    return SimpleNamespace(draw=lambda _: req)


@pytest.mark.parametrize("is_insert", [True, False])
def test_pages_without_residuals_are_freed_with_their_request(make_kv, early_machine, is_insert):
    machine = early_machine(make_kv)
    machine.start((0, 1, 0), 5, None)
    assert machine.early.has_pending_residuals(machine.running[0].rid)
    assert machine.tree.total_size() == 0
    machine.no_page_is_lost()
    machine.finish(choosing(machine.running[0]), is_insert, True)
    assert machine.early.rids == []
    assert machine.tree.total_size() == 0
    machine.no_page_is_lost()
    machine.pools_are_consistent()
    machine.teardown()


@pytest.mark.parametrize("num_found", [0, 1, 3])
def test_a_prefix_is_cached_once_its_residuals_are_here(make_kv, early_machine, num_found):
    """num_found: pages that another request has cached meanwhile."""
    machine = early_machine(make_kv)
    machine.start((0, 1, 0), 5, None)
    machine.admit((0, 1, 0)[:num_found], 5, None)
    machine.finish(choosing(machine.running[1]), True, False)
    machine.residuals_come(2)
    assert machine.tree.total_size() == num_found * SIZE
    machine.residuals_come(2)
    assert machine.tree.total_size() == machine.tree.protected_size() == 3 * SIZE
    machine.no_page_is_lost()
    machine.admit((0, 1, 0), 9, None)
    assert machine.hits["resident"] == 3 * SIZE
    machine.pools_are_consistent()
    machine.teardown()


def test_a_start_that_finds_no_room_leaves_nothing(make_kv, early_machine):
    machine = early_machine(make_kv)
    machine.start((0, 1, 0), 5, None)
    (req,) = machine.running
    # SGLang has loaded the request's prefix and then not admitted the request.
    machine.tree._detached = (0, machine.prefix_of(req))
    assert machine.tree.cancel_start()
    assert not machine.tree.cancel_start()
    assert machine.early.rids == []
    machine.pools_are_consistent()
    machine.teardown()


def caches_them_at_once(monkeypatch):
    monkeypatch.setattr(KVSpecRadixCache, "_has_pending_residuals", lambda cache, req: False)


def takes_them_to_be_in_the_tree(monkeypatch):
    monkeypatch.setattr(KVSpecRadixCache, "detach", lambda cache, req: None)


@pytest.mark.parametrize("fault", [caches_them_at_once, takes_them_to_be_in_the_tree])
def test_the_machine_finds(run_machine, early_machine, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run_machine(early_machine, 30, max_examples=400, phases=[Phase.generate])
