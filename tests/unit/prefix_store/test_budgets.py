"""Evictions and refusals when the disk, the queue or the bandwidth is used up."""

from __future__ import annotations

import pytest

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.kv.prefix_store import StoredPage


def test_a_full_store_evicts_the_leaf_used_longest_ago(make_store, small):
    store = make_store(4)
    trunk, left, right = [1, 1], [1, 1, 2, 2], [1, 1, 3, 3]
    for tokens in (left, right, [7, 7]):
        small.write_links(store, small.links(tokens))
    assert small.held(store, left) == (2, 2)
    small.write_links(store, small.links([8, 8]))
    # The trunk was used before the right branch, but the left branch depends on it.
    kept = [small.held(store, tokens)[0] for tokens in (trunk, left, right, [7, 7], [8, 8])]
    assert kept == [1, 2, 1, 1, 1]
    assert (store.counters.anchors_evicted, store.counters.residuals_evicted) == (1, 1)


def test_a_store_smaller_than_a_prefix_keeps_its_head(make_store, small):
    tokens = list(range(12))
    store = make_store(3)
    for link in small.links(tokens):
        store.put(link, small.anchor(link), small.residual(link))
    store.write_due()
    assert small.held(store, tokens) == (3, 3)
    assert (store.counters.no_room, store.counters.orphans) == (1, 2)


def test_residuals_are_evicted_while_anchors_stay(make_store, small):
    store = make_store(6, 2)
    small.write_links(store, small.links([1, 1, 2, 2]))
    small.write_links(store, small.links([3, 3]))
    assert small.held(store, [1, 1, 2, 2]) == (2, 1)
    assert small.held(store, [3, 3]) == (1, 1)
    store.close()
    again = make_store(6, 2)
    assert small.held(again, [1, 1, 2, 2]) == (2, 1)
    assert (again.num_pages, again.num_residuals) == (3, 2)


def test_a_page_evicted_after_its_lookup_is_a_miss(make_store, small):
    store = make_store(1)
    small.write_links(store, small.links([1, 2]))
    pages = store.lookup([1, 2]).pages
    small.write_links(store, small.links([3, 4]))
    assert small.read(store, pages) == ([None], [None])
    assert small.read(store, [StoredPage(bytes(32), 0)]) == ([None], [None])


def test_the_files_stay_within_the_budget(make_store, small, tmp_path):
    store = make_store(5, 3)
    for first in range(40):
        small.write_links(store, small.links([first, 1, 2, first]))
        used = sum(path.stat().st_size for path in (tmp_path / "store").glob("*.[di]*"))
        identity = (tmp_path / "store" / "identity.json").stat().st_size
        assert used - identity <= small.limits(5, 3).disk_bytes
    assert (store.num_pages, store.num_residuals) == (5, 3)


def test_a_smaller_budget_keeps_what_fits_and_shrinks_the_files(make_store, small, tmp_path):
    store = make_store(8)
    small.write_links(store, small.links(range(16)))
    store.close()
    again = make_store(3)
    assert small.held(again, list(range(16))) == (3, 3)
    assert again.num_pages == 3
    data = tmp_path / "store" / "anchors.data"
    assert data.stat().st_size == 3 * small.identity.anchor_page_bytes
    small.write_links(again, small.links([50, 51]))
    assert again.num_pages == 3


def test_a_full_queue_refuses_and_recovers(make_store, small):
    page_bytes = small.identity.anchor_page_bytes + small.identity.residual_page_bytes
    store = make_store(8, queue_bytes=2 * page_bytes)
    links = small.links(range(6))
    taken = [store.put(link, small.anchor(link), small.residual(link)) for link in links]
    assert taken == [True, True, False]
    assert store.counters.refused == 1
    # A page that waits is not queued again.
    assert store.put(links[0], small.anchor(links[0]), small.residual(links[0]))
    store.write_due()
    small.write_links(store, links)
    assert small.held(store, list(range(6))) == (3, 3)
    assert store.counters.anchors_written == 3


def test_writing_keeps_to_its_bandwidth(make_store, small, files):
    now = [0.0]
    page_bytes = small.identity.anchor_page_bytes + small.identity.residual_page_bytes
    options = {"write_bytes_per_s": float(page_bytes), "write_burst_bytes": 2 * page_bytes}
    store = make_store(20, clock=lambda: now[0], **options)
    for link in small.links(range(20)):
        store.put(link, small.anchor(link), small.residual(link))
    counts = []
    for _ in range(12):
        delay_s = store.write_due()
        counts.append(store.num_pages)
        if delay_s is None:
            break
        now[0] += delay_s + 1e-6
    assert counts[0] == 3
    assert counts[-1] == 10
    assert now[0] == pytest.approx(7, rel=0.01)


def test_a_queue_too_small_for_a_page_is_refused(make_store):
    with pytest.raises(ConfigError, match="at least the 64 bytes of a page, got 63"):
        make_store(queue_bytes=63)


def test_restarts_do_not_make_old_pages_young(make_store, small):
    store = make_store(3)
    for token in (1, 2, 3):
        small.write(store, [token, token])
    for token in (4, 5):
        store.close()
        store = make_store(3)
        small.write(store, [token, token])
    kept = [token for token in range(1, 6) if small.held(store, [token, token])[0]]
    assert kept == [3, 4, 5]
