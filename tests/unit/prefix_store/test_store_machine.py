"""A store under random use, with kills at random bytes and damaged files, never gives wrong
bytes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_kvspec.core.errors import PrefixStoreError
from sglang_kvspec.kv.prefix_store import StoredPage, open_reader, open_store, reader
from sglang_kvspec.kv.prefix_store.catalogue import Catalogue, Tier
from sglang_kvspec.kv.prefix_store.committer import Committer
from sglang_kvspec.kv.prefix_store.entries import EntryFormat
from sglang_kvspec.kv.prefix_store.leaf_order import LeafOrder
from sglang_kvspec.kv.prefix_store.page_keys import PageLink
from sglang_kvspec.kv.prefix_store.state import StoreState

# Token lists that share prefixes: two tokens a page, up to three pages.
prefixes = st.lists(st.sampled_from([(1, 1), (2, 2)]), min_size=1, max_size=3).map(
    lambda pages: [token for page in pages for token in page]
)
versions = st.integers(0, 1)
FILES = ("anchors.data", "anchors.index", "residuals.data", "residuals.index")


class StoreMachine(RuleBasedStateMachine):
    """Random use of a store. `put_versions` holds every version that was put of a page. A lookup
    must read one of these, with anchor and residual of the same version. Unless a file was damaged,
    the catalogue must survive the death of the writer."""

    def __init__(self, small, damaging=False):
        super().__init__()
        self.small = small
        self.damaging = damaging
        self.folder = Path(tempfile.mkdtemp())
        self.put_versions: dict[PageLink, set[int]] = {}
        self.prompts: dict[PageLink, list[int]] = {}
        # Lookups whose residuals are read later: links, pages and anchors.
        self.drafting = []
        self.store = None
        self.reader = None

    @initialize(num_pages=st.integers(1, 8), num_residuals=st.integers(0, 8))
    def start(self, num_pages, num_residuals):
        self.files = self.small.Files()
        self.num_slots = (num_pages, min(num_pages, num_residuals))
        self.limits = self.small.limits(*self.num_slots)
        self.damaged = False
        self.open()

    def open(self):
        self.files.kill_after = None
        self.store = open_store(
            self.folder / "store",
            self.small.identity,
            self.limits,
            open_file=self.files,
            threaded=False,
        )

    def kept(self):
        """Return the pages in the catalogue by key, with the sequences of their anchor and
        residual."""
        catalogue = self.store._state.catalogue
        return {
            link.key: tuple(
                held and held.sequence for held in (catalogue.held(t, link.key) for t in Tier)
            )
            for link in self.put_versions
            if catalogue.has(Tier.ANCHOR, link.key)
        }

    @rule(
        tokens=prefixes,
        version=versions,
        residuals=st.sampled_from([0, 1, 3]),
        then_write=st.booleans(),
    )
    def put(self, tokens, version, residuals, then_write=False):
        """Put the pages of a prompt, the first `residuals` pages with their residual."""
        for position, link in enumerate(self.small.links(tokens)):
            residual = self.small.residual(link, version) if position < residuals else None
            self.put_versions.setdefault(link, set()).add(version)
            self.prompts[link] = tokens[: self.small.page_size * (position + 1)]
            self.store.put(link, self.small.anchor(link, version), residual)
        if then_write:
            self.write()

    @rule()
    def write(self):
        assert self.store.write_due() is None
        self.verify_drafts()

    @rule(tokens=prefixes)
    def look_up(self, tokens):
        hit, anchors, residuals = self.check(self.store, tokens)
        if not self.damaged:
            assert None not in anchors, "an anchor was lost"
            assert None not in residuals[: hit.num_complete], "a residual was lost"

    def check(self, source, tokens):
        links = self.small.links(tokens)
        hit = source.lookup(tokens)
        anchors, residuals = self.small.read(source, hit.pages)
        self.check_pairs(links, anchors, residuals)
        return hit, anchors, residuals

    @rule(tokens=prefixes)
    def start_drafting(self, tokens):
        hit, anchors, _ = self.check(self.store, tokens)
        self.drafting.append((self.small.links(tokens), hit.pages, anchors))

    @rule()
    def verify_drafts(self):
        """Read residuals long after the anchors that they belong to."""
        for links, pages, anchors in self.drafting:
            self.check_pairs(links, anchors, self.small.read(self.store, pages)[1])
        del self.drafting[:-4]

    def check_pairs(self, links, anchors, residuals):
        for link, anchor, residual in zip(links, anchors, residuals, strict=False):
            known = self.put_versions.get(link, ())
            fitting = [v for v in known if anchor == self.small.anchor(link, v)]
            assert anchor is None or fitting, "an anchor that was never put"
            both = [v for v in known if residual == self.small.residual(link, v)]
            assert residual is None or both, "a residual that was never put"
            assert None in (anchor, residual) or fitting == both, "a pair that was never put"

    @rule(tokens=prefixes, version=versions, after=st.integers(0, 900))
    def die_while_writing(self, tokens, version, after):
        self.files.kill_after = after
        try:
            self.put(tokens, version, len(tokens))
            self.store.write_due()
        except self.small.Killed:
            pass
        before = self.kept()
        self.store._close_files()
        self.open()
        after_death = self.kept()
        if self.damaged:
            return
        for key, (anchor, residual) in before.items():
            assert key in after_death, "more was lost than what was being written"
            # A page that was being replaced may have either version.
            assert after_death[key][0] >= anchor
            assert residual in (None, after_death[key][1]), "a residual was lost"
        for link in list(self.put_versions):
            self.look_up(self.prompts[link])

    @rule()
    def restart(self):
        before = self.kept()
        self.store.close()
        self.open()
        assert self.damaged or self.kept() == before, "a restart changed what is kept"

    @rule(tokens=prefixes, reopen=st.booleans())
    def read_from_another_process(self, tokens, reopen):
        if reopen and self.reader is not None:
            self.reader.close()
            self.reader = None
        if self.reader is None:
            try:
                self.reader = open_reader(self.folder / "store", self.small.identity)
            except PrefixStoreError:
                assert self.damaged
                return
            if not self.damaged:
                assert self.reader.num_pages == len(self.kept())
        self.check(self.reader, tokens)

    @precondition(lambda self: self.damaging)
    @rule(
        name=st.sampled_from(FILES),
        at=st.floats(0, 1, exclude_max=True),
        action=st.sampled_from(["flip", "truncate", "zero", "swap"]),
        restart=st.booleans(),
    )
    def damage(self, name, at, action, restart):
        self.damaged = True
        path = self.folder / "store" / name
        content = bytearray(path.read_bytes())
        place = int(at * len(content))
        if action == "flip" and content:
            content[place] ^= 1 << place % 8
        elif action == "truncate":
            del content[place:]
        elif action == "zero":
            content[place : place + 100] = bytes(len(content[place : place + 100]))
        elif action == "swap":
            middle = len(content) // 2
            content = content[middle:] + content[:middle]
        path.write_bytes(content)
        if restart:
            self.store.close()
            self.open()

    @invariant()
    def books_balance(self):
        if self.store is None:
            return
        catalogue = self.store._state.catalogue
        catalogue.check_integrity()
        for shelf, num_slots in zip(catalogue._shelves, self.num_slots, strict=True):
            assert len(shelf.free) + len(shelf.held) == num_slots, "a slot was lost"
        used = sum((self.folder / "store" / name).stat().st_size for name in FILES)
        assert used <= self.limits.disk_bytes
        counters = self.store.counters
        if not self.damaged:
            links = [catalogue.link(key) for key in self.kept()]
            assert all(catalogue.is_reachable(link) for link in links), "an orphan"
            assert counters.damaged_anchors == counters.damaged_residuals == 0
            assert counters.read_errors == counters.write_errors == 0

    def teardown(self):
        for opened in (self.store, self.reader):
            if opened is not None:
                opened.close()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("damaging", [False, True], ids=["kills", "kills and damage"])
def test_never_wrong_and_nothing_lost_but_what_was_being_written(small, damaging):
    run_state_machine_as_test(
        lambda: StoreMachine(small, damaging),
        settings=settings(max_examples=100, stateful_step_count=40),
    )


# Faults that the machine must find


def checksums_are_not_compared(monkeypatch):
    monkeypatch.setattr(reader, "xxh3_64_intdigest", lambda row: AnyNumber())


class AnyNumber:
    def __eq__(self, other):
        return True

    __hash__ = None


def entries_are_not_checked(monkeypatch):
    monkeypatch.setattr(EntryFormat, "_check", lambda layout, slot, body: 77)
    checksums_are_not_compared(monkeypatch)


def a_residual_is_added_to_any_anchor(monkeypatch):
    right = Committer._takes_residual

    def any_stamp(committer, link, stamp):
        held = committer._state.catalogue.held(Tier.ANCHOR, link.key)
        return right(committer, link, held.checksum if held else 0)

    monkeypatch.setattr(Committer, "_takes_residual", any_stamp)
    monkeypatch.setattr(
        Committer,
        "_needs_anchor",
        lambda committer, put, stamp: (
            not (committer._state.catalogue.has(Tier.ANCHOR, put.link.key))
        ),
    )


def stamps_are_not_compared(monkeypatch):
    right = Catalogue.locate

    def any_version(catalogue, tier, page):
        held = catalogue.held(Tier.ANCHOR, page.key)
        return held and right(catalogue, tier, StoredPage(page.key, held.checksum))

    monkeypatch.setattr(Catalogue, "locate", any_version)


def evicted_slots_are_not_freed(monkeypatch):
    monkeypatch.setattr(StoreState, "vacate", lambda state, places: state._clear(places))


def evicted_entries_stay_on_disk(monkeypatch):
    monkeypatch.setattr(StoreState, "_clear", lambda state, places: None)


def parents_are_evicted_before_their_children(monkeypatch):
    def oldest(order, protected):
        return min(order._parents, key=order._used.__getitem__, default=None)

    monkeypatch.setattr(LeafOrder, "oldest_leaf", oldest)


@pytest.mark.parametrize(
    ("fault", "found_as"),
    [
        (checksums_are_not_compared, "that was never put"),
        (entries_are_not_checked, "that was never put|belongs to another page|'utf-8'"),
        (a_residual_is_added_to_any_anchor, "a pair that was never put|was lost|a restart changed"),
        (stamps_are_not_compared, "a pair that was never put"),
        (evicted_slots_are_not_freed, "a slot was lost"),
        (evicted_entries_stay_on_disk, "damaged_anchors|was lost"),
        (parents_are_evicted_before_their_children, "an orphan"),
    ],
)
def test_a_fault_is_found(small, monkeypatch, fault, found_as):
    fault(monkeypatch)
    damaging = fault in (checksums_are_not_compared, entries_are_not_checked)
    limits = settings(
        max_examples=400, stateful_step_count=40, phases=[Phase.generate], print_blob=False
    )
    with pytest.raises(AssertionError, match=found_as):
        run_state_machine_as_test(lambda: StoreMachine(small, damaging), settings=limits)
