"""State machine that uses ReferenceKVCache at random, and compares it with full-precision copies of
every page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.kv.residual_table import ResidualState

NUM_PAGES = 7
LAYERS = 2
seeds = st.integers(0, 2**31)
subsets = st.sets(st.integers(1, NUM_PAGES), min_size=1, max_size=3)


class Seen(NamedTuple):
    raw: torch.Tensor
    target: torch.Tensor
    anchor: torch.Tensor


class ReferenceKVMachine(RuleBasedStateMachine):
    """Random use of a ReferenceKVCache. `pages` holds K and V [2, LAYERS, page_size, heads,
    head_dim] of every page in use."""

    def __init__(self, make_kv, *, store=True, **options):
        super().__init__()
        self.store = store
        self.make_kv = partial(make_kv, num_pages=NUM_PAGES, num_layers=LAYERS, **options)
        self.pages: dict[int, torch.Tensor] = {}
        self.known: dict[int, Seen] = {}
        self.committed: set[int] = set()
        self.encoded: set[int] = set()

    @initialize(
        cache_pages=st.integers(0, 4),
        window_pages=st.integers(1, 4),
        first=st.sets(st.integers(1, NUM_PAGES), min_size=1, max_size=5),
        seed=seeds,
    )
    def build(self, cache_pages, window_pages, first, seed):
        self.kv = self.make_kv(
            cache_pages=cache_pages if self.store else None,
            store=self.store,
            window_pages=window_pages,
        )
        self.encode_directly(first, seed)

    # Actions of a server

    @rule(wanted=subsets, seed=seeds)
    def open_and_fill(self, wanted, seed):
        new = sorted(wanted - self.pages.keys())
        oldest_first = self.kv.window.committed_pages()
        if len(new) <= self.kv.window.slots.num_free + len(oldest_first):
            self.kv.open_pages(new)
        else:
            with pytest.raises(CapacityError):
                self.kv.open_pages(new)
        for page in new:
            if page in self.kv.window.slots:
                self.fill(page, seed + page)
        made_way = {page for page in oldest_first if page not in self.kv.window.slots}
        assert made_way == set(oldest_first[: len(made_way)])
        self.encoded |= made_way
        self.committed -= made_way

    @precondition(lambda self: self.mutable())
    @rule(data=st.data(), seed=seeds)
    def overwrite_tokens(self, data, seed):
        """Overwrite tokens in a window page, as verified tokens overwrite drafts."""
        page = data.draw(st.sampled_from(self.mutable()))
        size = self.kv.geometry.page_size
        offsets = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
        new = self.random_kv(seed)[:, :, offsets]
        for layer in range(LAYERS):
            self.kv.window.write(
                layer, torch.full((len(offsets),), page), torch.tensor(offsets), *new[:, layer]
            )
        self.pages[page] = self.pages[page].index_copy(2, torch.tensor(offsets), new)

    @precondition(lambda self: self.mutable())
    @rule(data=st.data())
    def commit(self, data):
        page = data.draw(st.sampled_from(self.mutable()))
        self.kv.window.mark_committed(page)
        self.committed.add(page)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def encode_window_pages(self, data):
        some = data.draw(st.sets(st.sampled_from(sorted(self.committed))))
        self.kv.move_out_of_window(list(some))
        self.encoded |= some
        self.committed -= some

    @rule(wanted=subsets, seed=seeds)
    def encode_directly(self, wanted, seed):
        pages = sorted(wanted - self.pages.keys(), reverse=True)
        self.kv.begin_encode(pages)
        for page in pages:
            self.pages[page] = self.random_kv(seed + page)
        for layer in range(LAYERS):
            if pages:
                k, v = torch.stack([self.pages[p][:, layer] for p in pages], dim=1)
                self.kv.encode(layer, torch.tensor(pages), k, v)
        self.kv.finish_encode(pages)
        self.encoded.update(pages)

    @rule(some=subsets)
    def free(self, some):
        self.kv.free_pages(some)
        for page in some:
            self.pages.pop(page, None)
        self.committed -= some
        self.encoded -= some

    @precondition(lambda self: not self.kv.anchor_places.holds_all)
    @rule(some=subsets)
    def free_anchors(self, some):
        self.kv.free_anchors(sorted(some & self.pages.keys()))

    @precondition(lambda self: self.store)
    @rule(data=st.data())
    def iterate(self, data):
        """Finish the fetches of the last iteration, evict some pages, and start to fetch some."""
        residuals = self.kv.residuals
        residuals.finish_fetches()
        resident = residuals.table.pages_in(sorted(self.encoded), ResidualState.RESIDENT)
        if resident:
            residuals.evict(data.draw(st.lists(st.sampled_from(resident), unique=True)))
        missing = residuals.missing(sorted(self.encoded))
        room = residuals.cache_slots.num_free
        if missing and room:
            some = st.lists(st.sampled_from(missing), unique=True, min_size=1, max_size=room)
            residuals.start_fetch(data.draw(some))

    @precondition(lambda self: self.kv.residuals.table.counts()["FETCHING"])
    @rule(data=st.data(), seed=seeds, reuse=st.booleans())
    def free_during_a_fetch(self, data, seed, reuse):
        table = self.kv.residuals.table
        fetching = table.pages_in(range(NUM_PAGES + 1), ResidualState.FETCHING)
        page = data.draw(st.sampled_from(fetching))
        self.free({page})
        if reuse:
            self.encode_directly({page}, seed)

    # What must hold

    @invariant()
    def pools_are_consistent(self):
        self.kv.check_integrity()
        assert {p for p in range(NUM_PAGES + 1) if self.kv.is_encoded(p)} == self.encoded
        assert set(self.kv.window.slots) == self.pages.keys() - self.encoded
        assert set(self.kv.window.committed_pages()) == self.committed

    @invariant()
    def the_target_reads_back(self):
        for layer, pages in self.layers_of_all_pages():
            got = self.kv.read_target(layer, torch.tensor(pages))
            assert_same_bits(got, [self.seen(page).target[:, layer] for page in pages])

    @rule()
    def a_draft_reads_anchors_and_the_window(self):
        for layer, every in self.layers_of_all_pages():
            pages = self.kv.draftable(torch.tensor(every)).tolist()
            without = set(every) - set(pages)
            assert without <= self.encoded
            assert not without or not self.kv.anchor_places.holds_all
            got = self.kv.read_draft(layer, torch.tensor(pages, dtype=torch.int64))
            want = [
                (self.seen(page).anchor if page in self.encoded else self.pages[page])[:, layer]
                for page in pages
            ]
            assert_same_bits(got, want)

    def teardown(self):
        if hasattr(self, "kv"):
            self.kv.free_all()
            self.kv.residuals.finish_fetches()
            self.kv.check_integrity()
            assert self.kv.window.slots.num_free == self.kv.plan.window_pages
            assert self.kv.residuals.cache_slots.num_free == self.kv.plan.cache_pages
            assert self.kv.residuals.table.counts()["ABSENT"] == NUM_PAGES + 1

    # Helpers

    def mutable(self):
        return sorted(self.pages.keys() - self.encoded - self.committed)

    def random_kv(self, seed):
        g = self.kv.geometry
        rng = torch.Generator().manual_seed(seed)
        shape = (2, LAYERS, g.page_size, g.num_kv_heads, g.head_dim)
        return (torch.randn(shape, generator=rng) * 3 + 1).to(g.dtype)

    def fill(self, page, seed):
        self.pages[page] = self.random_kv(seed)
        size = self.kv.geometry.page_size
        for layer in range(LAYERS):
            k, v = self.pages[page][:, layer]
            self.kv.window.write(layer, torch.full((size,), page), torch.arange(size), k, v)

    def seen(self, page):
        """Return a page as the codec alone reads it once encoded. The result is cached until the
        page changes."""
        raw = self.pages[page]
        if page not in self.known or self.known[page].raw is not raw:
            record = self.kv.codec.encode(*raw)
            target = raw
            if self.kv.codec.target == "int8":
                target = torch.stack(self.kv.codec.decode_target(*record))
            anchor = torch.stack(self.kv.codec.decode_anchor(record.anchor))
            self.known[page] = Seen(raw, target, anchor)
        return self.known[page]

    def layers_of_all_pages(self):
        """Return every layer with all pages in use, in an order that mixes their places."""
        ids = sorted(self.pages, key=lambda page: page * 5 % 8)
        return [(layer, ids) for layer in range(LAYERS)] if ids else []


def assert_same_bits(got, want):
    """Compare (k, v) of pages with a list of [2, page_size, heads, head_dim], one for each page."""
    for got_part, want_part in zip(torch.stack(got, dim=1), want, strict=True):
        assert got_part.dtype == want_part.dtype
        bits = got_part.contiguous().view(torch.uint8), want_part.contiguous().view(torch.uint8)
        assert torch.equal(*bits)


@pytest.fixture(scope="session")
def reference_kv_machine(make_kv) -> Callable[..., Callable[[], ReferenceKVMachine]]:
    """Return a function that makes machines for run_state_machine_as_test, with options of
    make_kv."""

    def bind(**options):
        return partial(ReferenceKVMachine, make_kv, **options)

    return bind
