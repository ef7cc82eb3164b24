"""Lookups, reads and refusals of a prefix store."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.codecs import make_codec
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.prefix_store import (
    StoreIdentity,
    StoreLimits,
    chain_links,
    open_store,
    page_keys,
    page_rows,
)
from sglang_kvspec.kv.prefix_store.write_queue import WriteQueue


def test_pages_are_read_back_also_after_a_restart(make_store, small):
    tokens = list(range(13))
    store = make_store()
    assert small.held(store, tokens) == (0, 0)
    small.write_links(store, small.links(tokens))
    assert small.held(store, tokens) == (6, 6)
    assert small.held(store, [*tokens[:6], 99, 99]) == (3, 3)
    assert small.held(store, tokens[:1]) == (0, 0)
    store.close()
    again = make_store()
    assert small.held(again, tokens) == (6, 6)
    assert again.counters.torn == again.counters.unpaired == again.counters.index_resets == 0


def test_namespaces_are_separate(make_store, small):
    store = make_store()
    small.write_links(store, small.links([1, 2, 3, 4]))
    assert len(store.lookup([1, 2, 3, 4]).pages) == 2
    assert len(store.lookup([1, 2, 3, 4], b"lora").pages) == 0


def test_a_collision_of_keys_is_a_miss(make_store, small, monkeypatch):
    right = page_keys._digest
    monkeypatch.setattr(page_keys, "_digest", lambda purpose, content: right(b"all one", b"")[:32])
    store = make_store()
    (one,), (two,) = small.links([1, 2]), small.links([3, 4])
    assert one.key == two.key
    small.write_links(store, [one])
    assert len(store.lookup([1, 2]).pages) == 1
    assert len(store.lookup([3, 4]).pages) == 0
    store.put(two, small.anchor(two, 1), small.residual(two, 1))
    store.write_due()
    assert len(store.lookup([3, 4]).pages) == 0
    assert small.read(store, store.lookup([1, 2]).pages) == (
        [small.anchor(one)],
        [small.residual(one)],
    )


def test_anchors_come_without_residuals_and_residuals_later(make_store, small):
    tokens = [1, 2, 3, 4]
    links = small.links(tokens)
    store = make_store()
    small.write_links(store, links, residuals=False)
    hit = store.lookup(tokens)
    assert (len(hit.pages), hit.num_complete) == (2, 0)
    assert small.read(store, hit.pages)[1] == [None, None]
    small.write_links(store, links)
    assert small.held(store, tokens) == (2, 2)
    assert store.counters.anchors_written == 2


def test_a_residual_needs_those_before_it(make_store, small):
    first, second = small.links([1, 2, 3, 4])
    store = make_store()
    small.write_links(store, [first], residuals=False)
    small.write_links(store, [second])
    assert store.lookup([1, 2, 3, 4]).num_complete == 0
    assert store.num_residuals == 0
    small.write_links(store, [first, second])
    assert small.held(store, [1, 2, 3, 4]) == (2, 2)


def test_pages_are_put_after_their_parents(make_store, small):
    first, second = small.links([1, 2, 3, 4])
    store = make_store()
    assert not store.put(second, small.anchor(second))
    assert store.counters.orphans == 1
    # A parent that is still in the queue is enough.
    assert store.put(first, small.anchor(first))
    assert store.put(second, small.anchor(second))
    store.write_due()
    assert store.num_pages == 2


def test_a_parent_may_be_written_while_its_page_is_put(make_store, small, monkeypatch):
    """The thread that writes takes the parent out of the queue at any moment of a put."""
    is_pending = WriteQueue.is_pending

    def write_and_ask(queue: WriteQueue, key: bytes) -> bool:
        queue.write_due()
        return is_pending(queue, key)

    def ask_and_write(queue: WriteQueue, key: bytes) -> bool:
        answer = is_pending(queue, key)
        queue.write_due()
        return answer

    store = make_store()
    for asked, *tokens in ((write_and_ask, 1, 2, 3, 4), (ask_and_write, 5, 6, 7, 8)):
        monkeypatch.setattr(WriteQueue, "is_pending", asked)
        first, second = small.links(tokens)
        assert store.put(first, small.anchor(first))
        assert store.put(second, small.anchor(second))
    store.write_due()
    assert (store.num_pages, store.counters.orphans) == (4, 0)


def test_an_anchor_and_a_residual_of_different_puts_never_meet(make_store, small):
    store = make_store()
    (link,) = small.links([1, 2])
    small.write_links(store, [link], residuals=False)
    (before,) = store.lookup([1, 2]).pages
    small.write_links(store, [link], version=1)
    (after,) = store.lookup([1, 2]).pages
    # A request that looked the page up before may draft on the old anchor, so the new residual must
    # not be read for it.
    assert small.read(store, [before]) == ([None], [None])
    assert small.read(store, [after]) == ([small.anchor(link, 1)], [small.residual(link, 1)])
    # A complete pair is not replaced.
    small.write_links(store, [link], version=2)
    assert small.read(store, [after]) == ([small.anchor(link, 1)], [small.residual(link, 1)])


def test_a_queued_anchor_does_not_stand_for_its_residual(make_store, small):
    store = make_store()
    (link,) = small.links([1, 2])
    assert store.put(link, small.anchor(link))
    assert store.put(link, small.anchor(link), small.residual(link))
    store.write_due()
    assert small.held(store, [1, 2]) == (1, 1)
    assert (store.counters.anchors_written, store.counters.residuals_written) == (1, 1)


def test_the_callers_memory_is_free_after_put(make_store, small):
    store = make_store()
    (link,) = small.links([1, 2])
    anchor, residual = bytearray(small.anchor(link)), bytearray(small.residual(link))
    store.put(link, anchor, residual)
    anchor[:], residual[:] = bytes(len(anchor)), bytes(len(residual))
    store.write_due()
    assert small.held(store, [1, 2]) == (1, 1)


def test_neighbours_are_read_in_one_go_in_any_order(make_store, small, files):
    store = make_store(32)
    small.write_links(store, small.links(range(40)))
    small.write_links(store, small.links([90, 91]))
    pages = store.lookup(range(40)).pages
    files.reads.clear()
    shuffled = pages[::-1][::2] + pages[::2]
    anchors, _ = small.read(store, shuffled)
    expected = {link.key: small.anchor(link) for link in small.links(range(40))}
    assert anchors == [expected[page.key] for page in shuffled]
    assert files.reads == [("anchors.data", 0, 20), ("residuals.data", 0, 20)]


def test_rows_of_the_wrong_size_are_refused(make_store, small):
    store = make_store()
    (link,) = small.links([1, 2])
    small.write_links(store, [link])
    pages = store.lookup([1, 2]).pages
    with pytest.raises(ValueError, match="a page's anchor takes 24 writable bytes, got 23"):
        store.read_anchors(pages, [memoryview(bytearray(23))])
    with pytest.raises(ValueError, match="writable"):
        store.read_anchors(pages, [memoryview(bytes(24))])
    with pytest.raises(ValueError, match="1 pages do not fit in 0 buffers"):
        store.read_anchors(pages, [])
    with pytest.raises(ValueError, match="a page's anchor takes 24 bytes, got 3"):
        store.put(link, b"abc")
    with pytest.raises(ValueError, match="a page's residual takes 40 bytes, got 24"):
        store.put(link, small.anchor(link), small.anchor(link))


@pytest.mark.parametrize("target", ["exact", "int8"])
@pytest.mark.parametrize("name", ["log4", "uniform4"])
def test_encoded_pages_come_back_bit_by_bit(tmp_path, name, target):
    geometry = KVGeometry(3, 2, 16, 32, torch.float32)
    codec = make_codec(name, target=target, page_size=32, head_dim=16, dtype=torch.float32)
    identity = StoreIdentity.of(codec, geometry, model="weights")
    torch.manual_seed(1)
    k, v = torch.randn(2, 4 * 3, 32, 2, 16)
    anchor, residual = (part.view(4, 3, 2, -1) for part in codec.encode(k, v))
    store = open_store(tmp_path, identity, StoreLimits(1 << 20), threaded=False)
    tokens = torch.randint(0, 1000, (4 * 32 + 5,)).tolist()
    for link, a, r in zip(
        chain_links(tokens, 32), page_rows(anchor), page_rows(residual), strict=True
    ):
        assert store.put(link, a, r)
    store.write_due()
    hit = store.lookup(tokens)
    assert hit.num_complete == 4
    got_anchor, got_residual = torch.zeros_like(anchor), torch.zeros_like(residual)
    assert store.read_anchors(hit.pages, page_rows(got_anchor)) == [True] * 4
    assert store.read_residuals(hit.pages, page_rows(got_residual)) == [True] * 4
    assert torch.equal(got_anchor, anchor)
    assert torch.equal(got_residual, residual)
    store.close()


def test_pages_of_strided_tensors_share_their_memory():
    pool = torch.zeros(4, 2, 6, dtype=torch.uint8)
    rows = page_rows(pool[::2])
    rows[1][:] = bytes(range(12))
    assert pool[2].flatten().tolist() == list(range(12))
    assert not pool[1].any()
    with pytest.raises(ValueError, match="contiguous"):
        page_rows(pool.transpose(1, 2))
    with pytest.raises(ValueError, match="uint8 on the CPU"):
        page_rows(pool.int())
    assert page_rows(pool[:0]) == []
