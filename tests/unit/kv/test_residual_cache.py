"""Residuals in cache and store: new pages, write-through, fetches, evictions, streamed reads."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.errors import CapacityError, ConfigError, PageStateError
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.record_copies import CpuRecordCopies
from sglang_kvspec.kv.residual_cache import ResidualCache
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.planning.capacity import CapacityPlan, PageBytes

LAYERS, HEADS, RECORD_BYTES, NUM_PAGES = 2, 2, 16, 8
PAGE_BYTES = LAYERS * HEADS * RECORD_BYTES


def make_cache(cache_pages=3, store=True):
    plan = CapacityPlan(
        num_pages=NUM_PAGES,
        window_pages=0,
        cache_pages=cache_pages if store else NUM_PAGES,
        host_pages=NUM_PAGES if store else 0,
        page_bytes=PageBytes(plain=1, anchor=1, residual=PAGE_BYTES),
        binding="KV memory",
    )
    geometry = KVGeometry(LAYERS, HEADS, 16, 32, torch.float32)
    return ResidualCache(geometry, plan, RECORD_BYTES, torch.device("cpu"), CpuRecordCopies())


def record(page, version, layer):
    """Return a page's residual of one layer [HEADS, RECORD_BYTES]. Versions differ in every
    byte."""
    rng = torch.Generator().manual_seed(1000 * page + 10 * version + layer)
    half = torch.randint(0, 128, (HEADS, RECORD_BYTES), generator=rng, dtype=torch.uint8)
    return half * 2 + version % 2


def give_birth(cache, *pages, version=0):
    cache.begin(pages)
    for layer in range(LAYERS):
        data = torch.stack([record(page, version, layer) for page in pages])
        cache.write(layer, torch.tensor(pages), data)
    cache.finish(pages)


def assert_reads(cache, *pages, version=0):
    for layer in range(LAYERS):
        want = torch.stack([record(page, version, layer) for page in pages])
        assert torch.equal(cache.read(layer, torch.tensor(pages)), want)


def states(cache, *pages):
    return [cache.table.state(page).name for page in pages]


def test_pages_are_born_in_the_cache_while_it_has_room():
    cache = make_cache(cache_pages=2)
    give_birth(cache, 1, 2, 3)
    assert states(cache, 1, 2, 3) == ["RESIDENT", "RESIDENT", "STORED"]
    assert cache.missing([3, 2, 1, 4]) == [3]
    assert cache.bytes_streamed == cache.bytes_fetched == 0
    cache.check_integrity()


def test_reads_are_in_the_order_asked_for_from_cache_and_store():
    cache = make_cache(cache_pages=2)
    give_birth(cache, 1, 2, 3, 4)
    assert_reads(cache, 4, 1, 3, 2, 1)
    assert_reads(cache, 2, 1)
    assert_reads(cache, 3)


def test_every_page_is_written_through():
    cache = make_cache(cache_pages=3)
    give_birth(cache, 1, 2, 3)
    cache.evict([1, 3])
    assert states(cache, 1, 2, 3) == ["STORED", "RESIDENT", "STORED"]
    assert cache.cache_slots.num_free == 2
    assert_reads(cache, 3, 2, 1)
    cache.check_integrity()


def test_prefetched_pages_are_read_without_streaming():
    cache = make_cache(cache_pages=3)
    give_birth(cache, 1, 2, 3, 4, 5)
    cache.evict([1, 2])
    # Page 4 comes twice, as where requests share a prefix. For page 5 there is no room.
    cache.prefetch([4, 3, 2, 4, 5, 8])
    assert states(cache, 1, 2, 3, 4, 5, 8) == [
        *("STORED", "RESIDENT", "RESIDENT"),
        *("RESIDENT", "STORED", "ABSENT"),
    ]
    assert_reads(cache, 2, 3, 4)
    assert cache.bytes_streamed == 0
    assert cache.bytes_fetched == 2 * PAGE_BYTES
    cache.check_integrity()
    everything_cached = make_cache(store=False)
    give_birth(everything_cached, 1)
    everything_cached.prefetch([1])
    assert states(everything_cached, 1) == ["RESIDENT"]


def test_streamed_bytes_are_counted_and_change_nothing():
    cache = make_cache(cache_pages=1)
    give_birth(cache, 1, 2, 3)
    assert_reads(cache, 1, 2, 3)
    assert cache.bytes_streamed == 2 * PAGE_BYTES
    assert states(cache, 1, 2, 3) == ["RESIDENT", "STORED", "STORED"]


def test_a_fetch_is_usable_once_it_finished():
    cache = make_cache(cache_pages=2)
    give_birth(cache, 1, 2)
    cache.evict([1, 2])
    cache.start_fetch([2])
    assert states(cache, 1, 2) == ["STORED", "FETCHING"]
    assert_reads(cache, 2)
    assert cache.bytes_streamed == PAGE_BYTES
    cache.finish_fetches()
    assert states(cache, 1, 2) == ["STORED", "RESIDENT"]
    assert_reads(cache, 2)
    assert cache.bytes_streamed == PAGE_BYTES
    assert cache.bytes_fetched == PAGE_BYTES
    cache.finish_fetches()
    cache.check_integrity()


def test_fetches_are_timed_by_themselves():
    cache = make_cache(cache_pages=3)
    give_birth(cache, 1, 2, 3)
    cache.evict([1, 2, 3])
    cache.start_fetch([1, 2])
    ((num_bytes, seconds),) = cache.take_fetch_times()
    assert num_bytes == 2 * PAGE_BYTES
    assert seconds > 0
    assert cache.take_fetch_times() == []


def test_a_fetch_needs_a_free_slot():
    cache = make_cache(cache_pages=1)
    give_birth(cache, 1, 2)
    with pytest.raises(CapacityError):
        cache.start_fetch([2])
    assert states(cache, 1, 2) == ["RESIDENT", "STORED"]
    cache.check_integrity()


def test_a_page_freed_during_its_fetch_stays_free():
    cache = make_cache()
    give_birth(cache, 1)
    cache.evict([1])
    cache.start_fetch([1])
    cache.release(1)
    cache.finish_fetches()
    assert states(cache, 1) == ["ABSENT"]
    assert cache.cache_slots.num_free == 3
    cache.check_integrity()


@pytest.mark.parametrize("fetch_again", [False, True])
def test_a_stale_fetch_does_not_resurrect_the_page_that_was_reused(fetch_again):
    cache = make_cache(cache_pages=1)
    give_birth(cache, 1)
    cache.evict([1])
    cache.start_fetch([1])
    cache.release(1)
    give_birth(cache, 2)
    give_birth(cache, 1, version=1)
    assert states(cache, 1) == ["STORED"]
    if fetch_again:
        cache.evict([2])
        cache.start_fetch([1])
    cache.finish_fetches()
    assert states(cache, 1) == ["RESIDENT" if fetch_again else "STORED"]
    assert_reads(cache, 1, version=1)
    cache.check_integrity()


@pytest.mark.parametrize("store", [True, False])
def test_a_reused_page_reads_as_its_latest_generation(store):
    cache = make_cache(cache_pages=1, store=store)
    for version in range(4):
        give_birth(cache, 1, 2, version=version)
        assert_reads(cache, 2, 1, version=version)
        cache.release(1)
        cache.release(2)
        cache.check_integrity()


def test_releasing_returns_the_slot_in_every_state():
    cache = make_cache()
    give_birth(cache, 1, 2, 3, 4)
    cache.evict([2, 3])
    cache.start_fetch([3])
    cache.begin([5])
    assert states(cache, 1, 2, 3, 4, 5) == [
        "RESIDENT",
        "STORED",
        "FETCHING",
        "STORED",
        "IN_FLIGHT",
    ]
    for page in range(NUM_PAGES + 1):
        cache.release(page)
    cache.finish_fetches()
    assert cache.cache_slots.num_free == 3
    assert cache.table.counts()["ABSENT"] == NUM_PAGES + 1
    cache.check_integrity()


def test_without_a_store_all_pages_live_in_the_cache():
    cache = make_cache(store=False)
    give_birth(cache, *range(1, NUM_PAGES + 1))
    assert set(states(cache, *range(1, NUM_PAGES + 1))) == {"RESIDENT"}
    assert cache.missing(range(NUM_PAGES + 1)) == []
    assert_reads(cache, 8, 1, 5)
    assert cache.store is None
    assert cache.bytes_streamed == 0
    with pytest.raises(AssertionError, match="needs a residual store"):
        cache.evict([1])


def test_without_a_cache_all_pages_stream():
    cache = make_cache(cache_pages=0)
    give_birth(cache, 1, 2)
    assert states(cache, 1, 2) == ["STORED", "STORED"]
    assert_reads(cache, 2, 1)
    assert (cache.hbm_nbytes, cache.bytes_streamed) == (0, 2 * PAGE_BYTES)


def test_reading_nothing():
    for cache in (make_cache(), make_cache(cache_pages=0), make_cache(store=False)):
        nothing = torch.empty(0, dtype=torch.int64)
        assert cache.read(0, nothing).shape == (0, HEADS, RECORD_BYTES)


def test_memory_is_what_the_plan_said():
    cache = make_cache(cache_pages=3)
    assert cache.hbm_nbytes == 3 * PAGE_BYTES
    # The store addresses pages by id, so it also has a slot for the padding page.
    assert cache.store.nbytes == (NUM_PAGES + 1) * PAGE_BYTES


def test_moves_out_of_turn_are_refused():
    cache = make_cache()
    give_birth(cache, 1)
    with pytest.raises(PageStateError):
        cache.begin([1])
    with pytest.raises(PageStateError):
        cache.finish([2])
    with pytest.raises(PageStateError):
        cache.evict([2])
    cache.check_integrity()


def test_a_refused_fetch_keeps_no_slot():
    cache = make_cache()
    with pytest.raises(PageStateError):
        cache.start_fetch([2])
    cache.check_integrity()


def test_a_page_evicted_during_its_fetch_stays_evicted():
    cache = make_cache()
    give_birth(cache, 1)
    cache.evict([1])
    cache.start_fetch([1])
    cache.evict([1])
    cache.finish_fetches()
    assert cache.table.state(1) is ResidualState.STORED


def test_a_free_page_cannot_be_read():
    cache = make_cache(cache_pages=0)
    give_birth(cache, 1)
    cache.release(1)
    with pytest.raises((AssertionError, PageStateError)):
        cache.read(0, torch.tensor([1]))


def test_integrity_check_sees_a_slot_of_a_page_that_is_not_cached():
    cache = make_cache()
    give_birth(cache, 1)
    cache.table.advance(1, ResidualState.STORED)
    with pytest.raises(AssertionError, match="STORED but has a cache slot"):
        cache.check_integrity()


def test_integrity_check_sees_a_resident_page_without_a_slot():
    cache = make_cache()
    give_birth(cache, 1)
    cache.cache_slots.release(1)
    with pytest.raises(AssertionError):
        cache.check_integrity()


def checked(**options):
    cache = make_cache(**options)
    cache.keep_checksums()
    return cache


def flip_a_bit(cache, page, layer=1):
    cache.store.layer(layer)[page, 1, 3] ^= 4


def test_a_page_that_changed_in_the_store_is_found_and_never_fetched():
    cache = checked(cache_pages=2)
    give_birth(cache, 1, 2, 3)
    cache.evict([1, 2])
    for layer, page in ((0, 1), (LAYERS - 1, 3)):
        assert cache.corrupt.find([page]) == []
        flip_a_bit(cache, page, layer)
        assert cache.corrupt.find([2, page]) == [page]
    cache.start_fetch([1, 2])
    cache.finish_fetches()
    assert states(cache, 1, 2, 3) == ["STORED", "RESIDENT", "STORED"]
    assert cache.bytes_fetched == PAGE_BYTES
    assert_reads(cache, 2)
    cache.check_integrity()


def test_what_is_in_the_cache_is_right_whatever_the_store_has():
    cache = checked(cache_pages=1)
    give_birth(cache, 1)
    flip_a_bit(cache, 1)
    assert cache.corrupt.find([1]) == []
    assert_reads(cache, 1)
    cache.evict([1])
    assert cache.corrupt.find([1]) == [1]


def test_a_corrupt_page_stays_so_until_it_is_freed():
    cache = checked(cache_pages=0)
    give_birth(cache, 1, 2)
    flip_a_bit(cache, 1)
    assert cache.corrupt.find([1, 2]) == [1]
    # The checksum alone would not show this later: the page reads as zeros, as any number but NaN
    # would do.
    assert cache.read(0, torch.tensor([1])).count_nonzero() == 0
    cache.corrupt.mark([2])
    assert cache.corrupt.find([1, 2]) == [1, 2]
    cache.release(1)
    cache.release(2)
    give_birth(cache, 1, 2, version=1)
    assert cache.corrupt.find([1, 2]) == []
    assert_reads(cache, 1, 2, version=1)


def test_a_page_that_is_being_fetched_is_checked_too():
    cache = checked(cache_pages=1)
    give_birth(cache, 1)
    cache.evict([1])
    cache.start_fetch([1])
    flip_a_bit(cache, 1)
    # Until a page has arrived, reads use the store.
    assert cache.corrupt.find([1]) == [1]


def test_without_checksums_nothing_is_looked_for():
    assert make_cache(cache_pages=0).corrupt is None


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()])
def test_a_store_that_cannot_be_allocated_is_one_sentence(monkeypatch, error):
    empty = torch.empty

    def refused(shape, **options):
        if shape[:2] == (LAYERS, NUM_PAGES + 1):
            raise error
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", refused)
    with pytest.raises(ConfigError, match=r"residual store of .* GiB .*--kvspec-host-gb"):
        make_cache()
