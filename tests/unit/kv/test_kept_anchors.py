"""Kept anchors stay in KV memory when their pages are freed. Only residuals are loaded again, and
only to the anchors that they were encoded with."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvspec_testkit.kv.toy_prefixes import compute, holds, links_of, room
from sglang_kvspec.kv.anchor_slots import AnchorSlots
from sglang_kvspec.kv.kept_anchors import KeptAnchors
from sglang_kvspec.kv.page_sources import Loaded
from sglang_kvspec.kv.prefix_store import (
    PrefixReader,
    StoreIdentity,
    open_memory_store,
    open_store,
)
from sglang_kvspec.kv.prefix_store.catalogue import Tier
from sglang_kvspec.kv.prefix_tiers import PrefixTiers
from sglang_kvspec.kv.record_transfers import RecordTransfers

LAYERS = 2


class Rig:
    """A KV cache with slots for kept anchors, and tiers with room for (anchors, residuals). reads:
    pages whose anchors were read from a tier, or copied out of the KV cache."""

    def __init__(self, make_kv, folder, monkeypatch, *, host=None, disk=None, kept=8, **options):
        self.kv = make_kv(num_layers=LAYERS, kept_anchor_pages=kept, **options)
        identity = StoreIdentity.of(self.kv.codec, self.kv.geometry, model="toy")
        make_host = host and partial(open_memory_store, identity, room(identity, *host))
        self.disk = disk and open_store(folder, identity, room(identity, *disk), threaded=False)
        self.kept = KeptAnchors(self.kv)
        self.tiers = PrefixTiers(self.kv, make_host, self.disk, kept=self.kept)
        self.reads = []
        read_tier, read_kv = PrefixReader.read_anchors, self.kv.records.read_anchors
        monkeypatch.setattr(
            PrefixReader,
            "read_anchors",
            lambda tier, pages, out: (self.reads.extend(pages), read_tier(tier, pages, out))[1],
        )
        self.kv.records.read_anchors = lambda pages: (self.reads.extend(pages), read_kv(pages))[1]

    def leave(self, *prompt, version=0, num_staying=0):
        """Compute a prompt, and evict its pages."""
        links = links_of(*prompt)
        pages = list(range(1, len(links) + 1))
        for page, link in zip(pages, links, strict=True):
            compute(self.kv, link, page, version)
        self.tiers.demote(links, pages, num_staying)
        self.kv.free_pages(pages)
        self.write()
        self.reads.clear()
        return links

    def write(self):
        if self.disk is not None:
            self.disk.write_due()

    def come_back(self, links, version=0, first_page=7):
        pages = list(range(first_page, first_page + len(links)))
        loaded = self.tiers.load(links, pages)
        for page, link in zip(pages[: loaded.num_pages], links, strict=False):
            assert holds(self.kv, page, link, version), "other KV"
        self.kv.check_integrity()
        self.kept.check_integrity()
        return loaded

    def report(self):
        return self.tiers.report()["kept_anchors"]


@pytest.fixture
def make_rig(make_kv, tmp_path, monkeypatch):
    rigs = []

    def make(**options):
        rigs.append(Rig(make_kv, tmp_path, monkeypatch, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        if rig.disk is not None:
            rig.disk.close()


@pytest.mark.parametrize("target", ["exact", "int8"])
@pytest.mark.parametrize("codec", ["log4", "uniform4"])
@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ({"host": (8, 8)}, Loaded(3, 0, kept_host=3)),
        ({"disk": (8, 8)}, Loaded(3, 3, kept_disk=3)),
        ({"host": (8, 1), "disk": (8, 8)}, Loaded(3, 2, kept_host=1, kept_disk=2)),
    ],
)
def test_only_residuals_are_loaded_again(make_rig, target, codec, tiers, expected):
    rig = make_rig(target=target, codec=codec, **tiers)
    links = rig.leave(1, 2, 3)
    assert rig.report()["pages"] == 3
    assert rig.tiers.num_loadable(links) == 3
    assert rig.come_back(links) == expected
    assert not rig.reads, "anchors were in KV memory"
    page = rig.kv.plan.page_bytes
    assert rig.tiers.report()["loaded_bytes"] == {"anchors": 0, "residuals": 3 * page.residual}
    # The anchors are in pages of the KV cache again.
    assert rig.report()["pages"] == 0
    assert rig.report()["counters"] == {"kept": 3, "reused": 3, "dropped": 0}


def test_the_next_time_nothing_has_to_be_read_at_all(make_rig):
    rig = make_rig(disk=(8, 8))
    links = rig.leave(1, 2)
    for first_page in (7, 3):
        rig.come_back(links, first_page=first_page)
        pages = [first_page, first_page + 1]
        rig.tiers.demote(links, pages)
        rig.kv.free_pages(pages)
    assert not rig.reads, "checksums were known"
    assert rig.come_back(links) == Loaded(2, 2, kept_disk=2)


def test_what_stays_in_the_kv_cache_is_not_kept_twice(make_rig):
    rig = make_rig(host=(8, 8))
    links = rig.leave(1, 2, 3, num_staying=2)
    assert rig.report()["pages"] == 1
    assert rig.come_back(links[2:]) == Loaded(1, 0, kept_host=1)


@pytest.mark.parametrize("host", [(8, 2), None])
def test_without_residuals_below_anchors_go_too(make_rig, host):
    rig = make_rig(host=host)
    rig.leave(1, 2, 3)
    assert rig.report()["pages"] == (2 if host else 0)


def test_no_more_is_kept_than_there_are_slots(make_rig):
    rig = make_rig(disk=(12, 12), kept=3)
    first, second = rig.leave(1, 2), rig.leave(3, 4)
    assert rig.report()["pages"] == 3
    # The evicted page is the last one of the prefix that left first.
    assert rig.come_back(second) == Loaded(2, 2, kept_disk=2)
    assert rig.come_back(first, first_page=9) == Loaded(2, 2, kept_disk=1)
    assert rig.report()["counters"] == {"kept": 4, "reused": 3, "dropped": 1}


def test_the_prefix_that_was_looked_up_longest_ago_is_evicted(make_rig):
    rig = make_rig(disk=(12, 12), kept=2)
    first, second = rig.leave(1), rig.leave(2)
    assert rig.tiers.num_loadable(first) == 1
    rig.leave(3)
    assert rig.come_back(first) == Loaded(1, 1, kept_disk=1)
    assert rig.come_back(second, first_page=9) == Loaded(1, 1)


def test_anchors_of_another_version_are_not_kept(make_rig):
    """The tier keeps its residuals of the first version."""
    rig = make_rig(host=(8, 8))
    links = rig.leave(1, 2)
    rig.kept.forget()
    rig.leave(1, 2, version=1)
    assert rig.report()["pages"] == 0
    assert rig.come_back(links, version=0) == Loaded(2, 0)


def test_kept_anchors_never_get_the_residual_of_another_version(make_rig):
    """The tier receives another version after anchors were kept."""
    rig = make_rig(host=(8, 8))
    links = rig.leave(1, 2)
    rig.tiers._host = rig.tiers._make_host()
    for page, link in zip((1, 2), links, strict=True):
        compute(rig.kv, link, page, version=1)
    # Bypass demote(), which would keep the anchors of this version.
    rig.tiers._put(0, rig.tiers._host.put, links, (1, 2))
    assert rig.report()["pages"] == 2
    assert rig.come_back(links, version=1) == Loaded(2, 0)


def takes_any_version(monkeypatch):
    def slot_of(slots, page):
        held = slots._catalogue.held(Tier.ANCHOR, page.key)
        return held and held.slot

    monkeypatch.setattr(AnchorSlots, "slot_of", slot_of)


def test_mixed_versions_are_found(make_rig, monkeypatch):
    takes_any_version(monkeypatch)
    with pytest.raises(AssertionError, match="other KV"):
        test_kept_anchors_never_get_the_residual_of_another_version(make_rig)


def test_a_page_that_was_freed_has_no_known_checksum(make_rig):
    """The page id now belongs to another page."""
    rig = make_rig(host=(8, 8))
    links = rig.leave(1, 2)
    rig.kept.forget()
    other = rig.leave(3, 4)
    assert rig.come_back(other) == Loaded(2, 0, kept_host=2)
    assert rig.come_back(links, first_page=9) == Loaded(2, 0)


def test_a_damaged_residual_ends_the_prefix_and_its_anchors_stay(make_rig, tmp_path):
    rig = make_rig(disk=(8, 8))
    links = rig.leave(1, 2, 3)
    path = tmp_path / "residuals.data"
    content = bytearray(path.read_bytes())
    content[rig.kv.plan.page_bytes.residual + 9] ^= 8
    path.write_bytes(content)
    assert rig.come_back(links) == Loaded(1, 1, kept_disk=1)
    assert not rig.kv.is_encoded(8)
    assert rig.report()["pages"] == 2
    # After another computation the page has its residual again.
    rig.kv.free_pages([7])
    rig.leave(1, 2, 3)
    assert rig.come_back(links) == Loaded(3, 3, kept_disk=3)


def test_a_flush_drops_kept_anchors(make_rig):
    rig = make_rig(disk=(8, 8))
    links = rig.leave(1, 2)
    rig.tiers.forget_memory()
    assert rig.report()["pages"] == 0
    assert rig.come_back(links) == Loaded(2, 2)


def test_pages_come_from_several_places_at_once(make_rig):
    """Anchors of the first page are kept, those of the second are in host memory, and those of the
    third on disk."""
    rig = make_rig(host=(2, 1), disk=(8, 8), kept=1)
    links = rig.leave(1, 2, 3)
    assert rig.tiers.report()["host"]["pages"] == 2
    loaded = rig.come_back(links)
    assert (loaded.num_pages, loaded.kept_host + loaded.kept_disk) == (3, 1)


# Prompts of two pages. (0, 0) and (0, 1) differ in the second page.
PROMPTS = ((0, 0), (0, 1), (1, 1))
leaving = st.tuples(
    st.just("leave"), st.sampled_from(PROMPTS), st.integers(0, 1), st.integers(0, 1)
)
coming = st.tuples(
    st.just("come_back"),
    st.sampled_from(PROMPTS),
    st.integers(0, 1),
    st.permutations((1, 2, 3, 4)),
)
# Generated lists instead of a state machine, which would usually repeat one action.
histories = st.lists(leaving | coming | leaving | coming | st.just(("lose",)), min_size=12)


class Life:
    """Prefixes that leave and return, one at a time. The tier below may lose all its pages."""

    def __init__(self, make_kv):
        self.kv = make_kv(num_pages=4, kept_anchor_pages=3)
        self.kept = KeptAnchors(self.kv)
        identity = StoreIdentity.of(self.kv.codec, self.kv.geometry, model="toy")
        self.make_host = partial(open_memory_store, identity, room(identity, 3, 3))
        self.tiers = PrefixTiers(self.kv, self.make_host, kept=self.kept)

    def leave(self, prompt, version, num_staying):
        links, pages = links_of(*prompt), (1, 2)
        for page, link in zip(pages, links, strict=True):
            compute(self.kv, link, page, version)
        self.tiers.demote(links, pages, num_staying)

    def come_back(self, prompt, skip, pages):
        links = links_of(*prompt)[skip:]
        num_pages = self.tiers.num_loadable(links)
        loaded = self.tiers.load(links[:num_pages], pages[:num_pages])
        assert loaded.kept_host <= loaded.num_pages == num_pages
        for page, link in zip(pages[:num_pages], links, strict=False):
            assert any(holds(self.kv, page, link, version) for version in (0, 1)), "mixed versions"

    def lose(self):
        self.tiers._host = self.make_host()

    def check(self):
        self.kv.check_integrity()
        self.kept.check_integrity()
        assert self.kept.report()["pages"] <= 3


def live(make_kv, **options):
    """Run generated histories."""

    @settings(**options)
    @given(histories)
    def run(history):
        life = Life(make_kv)
        for name, *arguments in history:
            getattr(life, name)(*arguments)
            life.check()
            life.kv.free_all()

    run()


def test_anchors_under_random_use(make_kv):
    live(make_kv, max_examples=60)


def restores_the_wrong_anchors(monkeypatch):
    right = RecordTransfers.restore_anchors
    monkeypatch.setattr(
        RecordTransfers, "restore_anchors", lambda kv, slots, pages: right(kv, slots[::-1], pages)
    )


def forgets_generations(monkeypatch):
    monkeypatch.setattr(KeptAnchors, "_is_known", lambda kept, page: page in kept._stamps)


def keeps_the_wrong_anchors(monkeypatch):
    right = RecordTransfers.keep_anchors
    monkeypatch.setattr(
        RecordTransfers, "keep_anchors", lambda kv, pages, slots: right(kv, pages[::-1], slots)
    )


@pytest.mark.parametrize(
    "fault",
    [
        takes_any_version,
        restores_the_wrong_anchors,
        forgets_generations,
        keeps_the_wrong_anchors,
    ],
)
def test_random_use_finds(make_kv, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="mixed versions"):
        live(make_kv, max_examples=200, phases=[Phase.generate])
