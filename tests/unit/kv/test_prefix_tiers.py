"""Prefixes that left the KV cache are loaded unchanged, up to the first page of which a part is
missing."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from kvspec_testkit.kv.toy_prefixes import compute, holds, links_of, room
from sglang_kvspec.kv import prefix_reads, prefix_tiers
from sglang_kvspec.kv.kept_anchors import KeptAnchors
from sglang_kvspec.kv.page_records import copy_in, copy_out
from sglang_kvspec.kv.page_sources import Loaded
from sglang_kvspec.kv.prefix_store import (
    PrefixReader,
    StoreIdentity,
    open_memory_store,
    open_store,
)
from sglang_kvspec.kv.prefix_tiers import PrefixTiers
from sglang_kvspec.kv.residual_cache import ResidualCache

LAYERS = 2


@pytest.fixture
def identity_of():
    return lambda kv: StoreIdentity.of(kv.codec, kv.geometry, model="toy")


@pytest.fixture
def open_tiers(tmp_path, identity_of):
    """Return a function that opens tiers over a KV cache, with room for (anchors, residuals) in
    host memory and on disk."""
    opened = []

    def make(kv, host=None, disk=None):
        identity = identity_of(kv)
        make_host = disk_store = None
        if host:
            make_host = partial(open_memory_store, identity, room(identity, *host))
        if disk:
            disk_store = open_store(
                tmp_path / "store", identity, room(identity, *disk), threaded=False
            )
            opened.append(disk_store)
        return PrefixTiers(kv, make_host, disk_store)

    yield make
    for store in opened:
        store.close()


@pytest.mark.parametrize("codec", ["log4", "uniform4"])
@pytest.mark.parametrize("target", ["exact", "int8"])
@pytest.mark.parametrize("cache_pages", [None, 0, 1])
def test_copies_of_pages_are_the_pages(make_kv, codec, target, cache_pages):
    kv = make_kv(codec=codec, target=target, num_layers=LAYERS, cache_pages=cache_pages)
    links = links_of(1, 2, 3)
    for page, link in zip((4, 2, 7), links, strict=True):
        compute(kv, link, page)
    records = copy_out(kv, (7, 4))
    kv.free_pages((7, 4, 2))
    copy_in(kv, (1, 7), records)
    assert holds(kv, 1, links[2])
    assert holds(kv, 7, links[0])
    kv.check_integrity()
    streamed = kv.residuals.bytes_streamed
    copy_out(kv, (1, 7))
    assert kv.residuals.bytes_streamed == streamed, "a copy is no read of a forward"


def demoted(kv, tiers, *prompt, first_page=1):
    """Compute a prompt, give it to the tiers, and free its pages. Return its links."""
    links = links_of(*prompt)
    pages = list(range(first_page, first_page + len(links)))
    for page, link in zip(pages, links, strict=True):
        compute(kv, link, page)
    tiers.demote(links, pages)
    kv.free_pages(pages)
    return links


def test_a_prefix_is_loaded_from_host_memory(make_kv, open_tiers):
    kv = make_kv(num_layers=LAYERS, num_pages=40)
    tiers = open_tiers(kv, host=(64, 64))
    # More pages than one batch of copies.
    links = demoted(kv, tiers, *range(prefix_tiers.BATCH_PAGES + 3))
    assert tiers.num_loadable(links) == len(links)
    pages = list(range(20, 20 + len(links)))
    assert tiers.load(links, pages) == Loaded(len(links), 0)
    assert all(holds(kv, page, link) for page, link in zip(pages, links, strict=True))
    assert tiers.num_loadable(links_of(5, 6)) == 0
    tiers.forget_memory()
    assert tiers.num_loadable(links) == 0


def test_a_prefix_ends_before_a_page_that_needs_more_than_a_slot(make_kv, open_tiers):
    kv = make_kv(num_layers=LAYERS, packs=True, dtype=torch.bfloat16)
    tiers = open_tiers(kv, host=(8, 8))
    links = links_of(1, 2, 3)
    for page, link in zip((1, 2, 3), links, strict=True):
        compute(kv, link, page)
    # Values of page 2 that no anchor comes near.
    sizes = torch.rand(2, 1, LAYERS, 32, 2, 16, generator=torch.Generator().manual_seed(0))
    kv.free_pages([2])
    kv.write_whole([2], *(2.0 ** (30 * sizes - 16)).to(torch.bfloat16))
    tiers.demote(links, [1, 2, 3])
    assert tiers.num_loadable(links) == 1
    assert tiers.report()["too_large"] == 1


def test_a_suffix_of_a_prefix_is_found_by_its_own_links(make_kv, open_tiers):
    kv = make_kv(num_layers=LAYERS)
    tiers = open_tiers(kv, host=(8, 8), disk=(8, 8))
    links = demoted(kv, tiers, 1, 2, 3)
    assert tiers.num_loadable(links[1:]) == 2
    assert tiers.load(links[1:], [9, 5]).num_pages == 2
    assert holds(kv, 9, links[1])
    assert holds(kv, 5, links[2])


def test_evicted_residuals_are_loaded_from_disk_to_the_anchors_that_stayed(
    make_kv, open_tiers, monkeypatch
):
    kv = make_kv(num_layers=LAYERS)
    tiers = open_tiers(kv, host=(8, 1), disk=(8, 8))
    links = demoted(kv, tiers, 1, 2, 3)
    tiers.disk.write_due()
    report = tiers.report()
    assert (report["host"]["pages"], report["host"]["residuals"]) == (3, 1)
    anchors_read = []
    read_anchors = type(tiers.disk).read_anchors

    def watched(store, pages, out):
        if store is tiers.disk:
            anchors_read.extend(pages)
        return read_anchors(store, pages, out)

    monkeypatch.setattr(PrefixReader, "read_anchors", watched)
    assert tiers.load(links, [7, 8, 9]) == Loaded(3, 2)
    assert all(holds(kv, page, link) for page, link in zip((7, 8, 9), links, strict=True))
    assert not anchors_read, "the anchors were in host memory"


def test_without_a_disk_a_prefix_ends_where_its_residuals_do(make_kv, open_tiers):
    kv = make_kv(num_layers=LAYERS)
    tiers = open_tiers(kv, host=(8, 2))
    links = demoted(kv, tiers, 1, 2, 3, 4)
    assert tiers.report()["host"]["pages"] == 4
    assert tiers.num_loadable(links) == 2
    assert tiers.load(links, [5, 6, 7, 8]) == Loaded(2, 0)
    assert not kv.is_encoded(7)
    kv.check_integrity()


def test_an_anchor_never_gets_the_residual_of_another_version(make_kv, open_tiers):
    """Equal tokens were computed in two batches. Both results are right, but their parts must not
    be mixed."""
    kv = make_kv(num_layers=LAYERS)
    tiers = open_tiers(kv, host=(8, 1), disk=(8, 8))
    links = links_of(1, 2)
    for page, link in zip((1, 2), links, strict=True):
        compute(kv, link, page)
    tiers.spill(links, [1, 2])
    tiers.disk.write_due()
    kv.free_pages([1, 2])
    for page, link in zip((3, 4), links, strict=True):
        compute(kv, link, page, version=1)
    # Host memory has both anchors of this version, and one residual.
    tiers.demote(links, [3, 4])
    assert tiers.load(links, [5, 6]) == Loaded(2, 1)
    assert holds(kv, 5, links[0], version=1)
    assert holds(kv, 6, links[1], version=0)


def damage(store_folder: Path, name: str, record: int, record_bytes: int) -> None:
    (path,) = store_folder.rglob(name)
    with path.open("r+b") as file:
        file.seek(record * record_bytes + record_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("part", ["anchors", "residuals"])
def test_a_damaged_page_ends_the_prefix_and_is_counted(make_kv, open_tiers, tmp_path, part):
    kv = make_kv(num_layers=LAYERS)
    tiers = open_tiers(kv, disk=(8, 8))
    links = demoted(kv, tiers, 1, 2, 3)
    tiers.disk.write_due()
    page_bytes = getattr(kv.plan.page_bytes, part[:-1])
    damage(tmp_path, f"{part}.data", 1, page_bytes)
    assert tiers.num_loadable(links) == 3
    assert tiers.load(links, [4, 5, 6]) == Loaded(1, 1)
    assert holds(kv, 4, links[0])
    assert not kv.is_encoded(5)
    assert tiers.report()["disk"]["counters"][f"damaged_{part}"] == 1
    assert tiers.num_loadable(links) == 1
    # Pages that are computed again are stored again.
    for page, link in zip((5, 6), links[1:], strict=True):
        compute(kv, link, page)
    tiers.spill(links, [4, 5, 6])
    tiers.disk.write_due()
    assert tiers.num_loadable(links) == 3


@pytest.mark.parametrize("packs", [False, True])
def test_nothing_is_loaded_where_the_first_page_is_damaged_or_absent(
    make_kv, open_tiers, identity_of, tmp_path, packs
):
    kv = make_kv(num_layers=LAYERS, packs=packs, dtype=torch.bfloat16)
    tiers = open_tiers(kv, disk=(8, 8))
    assert tiers.load(links_of(4, 5), [4, 5]) == Loaded(0, 0)
    links = demoted(kv, tiers, 1, 2, 3)
    tiers.disk.write_due()
    damage(tmp_path, "residuals.data", 0, identity_of(kv).residual_page_bytes)
    assert tiers.num_loadable(links) == 3
    assert tiers.load(links, [4, 5, 6]) == Loaded(0, 0)


def test_new_weights_neither_read_nor_write_the_disk(make_kv, open_tiers):
    kv = make_kv(num_layers=LAYERS)
    tiers = open_tiers(kv, disk=(8, 8))
    links = demoted(kv, tiers, 1)
    tiers.disk.write_due()
    tiers.weights_will_change()
    assert tiers.num_loadable(links) == 0
    demoted(kv, tiers, 2)
    assert tiers.report()["disk"]["pages"] == 1
    assert tiers.report()["disk"]["is_stale"]


class TiersMachine(RuleBasedStateMachine):
    """Compute, spill, demote and load prefixes, with small tiers, damaged records and killed
    processes. The content of each page names its tokens and version."""

    NUM_PAGES = 10
    NUM_KEPT = 0
    KV_OPTIONS: ClassVar[dict] = {}
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)

    def __init__(self, make_kv):
        super().__init__()
        self.kv = make_kv(
            num_layers=LAYERS,
            num_pages=self.NUM_PAGES,
            cache_pages=3,
            kept_anchor_pages=self.NUM_KEPT,
            **self.KV_OPTIONS,
        )
        self.identity = StoreIdentity.of(self.kv.codec, self.kv.geometry, model="toy")
        self.folder = Path(tempfile.mkdtemp())
        self.disk = None
        self.start_process()

    def start_process(self):
        self.kv.free_all()
        if self.disk is not None:
            self.disk.close()
        self.disk = open_store(
            self.folder / "store", self.identity, room(self.identity, 6, 4), threaded=False
        )
        make_host = partial(open_memory_store, self.identity, room(self.identity, 5, 3))
        self.kept = KeptAnchors(self.kv) if self.NUM_KEPT else None
        self.tiers = PrefixTiers(self.kv, make_host, self.disk, kept=self.kept)

    def teardown(self):
        self.disk.close()
        shutil.rmtree(self.folder)

    @rule(prompt=prompts, version=st.integers(0, 1), how=st.sampled_from(["spill", "demote"]))
    def compute_and_keep(self, prompt, version, how):
        links = links_of(*prompt)
        pages = list(range(1, len(links) + 1))
        self.kv.free_all()
        for page, link in zip(pages, links, strict=True):
            compute(self.kv, link, page, version)
        getattr(self.tiers, how)(links, pages)

    @rule()
    def write(self):
        self.disk.write_due()

    @rule(prompt=prompts, skip=st.integers(0, 2))
    def load(self, prompt, skip):
        links = links_of(*prompt)[skip:]
        promised = self.tiers.num_loadable(links)
        pages = list(range(self.NUM_PAGES, self.NUM_PAGES - promised, -1))
        self.kv.free_all()
        loaded = self.tiers.load(links[:promised], pages)
        assert loaded.kept_disk <= loaded.num_from_disk <= loaded.num_pages <= promised
        assert loaded.kept_host <= loaded.num_pages - loaded.num_from_disk
        for i, (page, link) in enumerate(zip(pages, links, strict=False)):
            assert self.kv.is_encoded(page) == (i < loaded.num_pages)
            if i < loaded.num_pages:
                assert any(holds(self.kv, page, link, version) for version in (0, 1))
        if not self.damaged:
            assert loaded.num_pages == promised

    damaged = False

    @precondition(lambda self: self.disk.num_pages)
    @rule(part=st.sampled_from(["anchors", "residuals"]), record=st.integers(0, 5))
    def damage(self, part, record):
        page_bytes = getattr(self.identity, f"{part[:-1]}_page_bytes")
        (path,) = self.folder.rglob(f"{part}.data")
        if path.stat().st_size >= (record + 1) * page_bytes:
            damage(self.folder, f"{part}.data", record, page_bytes)
            self.damaged = True

    @rule()
    def flush(self):
        self.tiers.forget_memory()

    @rule()
    def die_and_start_again(self):
        """Kill the process, which loses the pages that wait for the disk."""
        self.start_process()

    @invariant()
    def pools_are_consistent(self):
        self.kv.check_integrity()
        if self.kept is not None:
            self.kept.check_integrity()


class KeptTiersMachine(TiersMachine):
    """TiersMachine with anchors of a few pages kept in KV memory."""

    NUM_KEPT = 3


class PackedTiersMachine(KeptTiersMachine):
    """KeptTiersMachine with packed residuals in the tiers."""

    KV_OPTIONS: ClassVar[dict] = {"packs": True, "dtype": torch.bfloat16}


@pytest.mark.parametrize("machine", [TiersMachine, KeptTiersMachine, PackedTiersMachine])
def test_loaded_pages_are_those_that_were_computed(run_machine, machine):
    run_machine(machine, 25, max_examples=25)


def counts_anchors_alone(monkeypatch):
    """Count pages that have an anchor but no residual."""
    monkeypatch.setattr(
        PrefixTiers,
        "num_loadable",
        lambda tiers, links: max(len(hit.pages) for hit in tiers._hits(links)),
    )


def copies_the_wrong_residual(monkeypatch):
    right = ResidualCache.read_pages
    monkeypatch.setattr(
        ResidualCache, "read_pages", lambda cache, pages: right(cache, [*pages[1:], *pages[:1]])
    )


def test_the_machine_finds_wrong_residuals(run_machine, monkeypatch):
    copies_the_wrong_residual(monkeypatch)
    with pytest.raises(AssertionError):
        run_machine(TiersMachine, 25, max_examples=300, phases=[Phase.generate])


def test_anchors_that_are_counted_alone_are_found(make_kv, open_tiers, monkeypatch):
    """A scripted test, since few histories have a tier with fewer residuals than anchors."""
    counts_anchors_alone(monkeypatch)
    with pytest.raises(AssertionError):
        test_without_a_disk_a_prefix_ends_where_its_residuals_do(make_kv, open_tiers)


def test_mixed_versions_are_found(make_kv, open_tiers, monkeypatch):
    """Use an anchor in host memory for any residual on disk."""
    right = prefix_reads._read_paired_anchors

    def wrong(host, in_host, on_disk, wanted, anchors):
        wanted = [i for i in wanted if i < len(in_host.pages)]
        return right(host, in_host, in_host, wanted, anchors)

    monkeypatch.setattr(prefix_reads, "_read_paired_anchors", wrong)
    with pytest.raises(AssertionError):
        test_an_anchor_never_gets_the_residual_of_another_version(make_kv, open_tiers)
