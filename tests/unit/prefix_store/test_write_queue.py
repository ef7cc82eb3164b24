"""The writing thread ends when told to, survives errors, and blocks no caller."""

from __future__ import annotations

import logging
from threading import Event

import pytest

from sglang_kvspec.kv.prefix_store.budget import TokenBucket
from sglang_kvspec.kv.prefix_store.write_queue import WriteQueue

WAIT_S = 20.0


class Disk:
    """Disk whose commits wait for `let_go`."""

    def __init__(self):
        self.arrived, self.let_go = Event(), Event()
        self.done = []
        self.error = None

    def commit(self, put):
        self.arrived.set()
        assert self.let_go.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.done.append(put.link.position)


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.let_go.set()


@pytest.fixture
def queue(disk):
    queue = WriteQueue(disk.commit, 100, TokenBucket(None, 1, lambda: 0.0))
    queue.start()
    yield queue
    disk.let_go.set()
    assert queue.close(WAIT_S)


def test_a_stalled_disk_blocks_no_caller_and_memory_stays_bounded(queue, disk, small):
    links = small.links(range(20))
    taken = [queue.put(link, b"a" * 20, b"r" * 10) for link in links]
    assert taken == [True] * 3 + [False] * 7
    assert disk.arrived.wait(WAIT_S)
    # The page that is being written still uses its room.
    assert not queue.put(links[5], b"a" * 20, None)
    assert all(queue.is_pending(link.key) for link in links[:3])
    assert not queue.flush(0)
    disk.let_go.set()
    assert queue.flush(WAIT_S)
    assert disk.done == [0, 1, 2]
    assert not any(queue.is_pending(link.key) for link in links)
    assert queue.put(links[5], b"a" * 100, None)
    assert queue.flush(WAIT_S)


def test_closing_finishes_the_page_at_hand_and_drops_the_rest(queue, disk, small):
    links = small.links(range(6))
    for link in links:
        assert queue.put(link, b"a", None)
    assert disk.arrived.wait(WAIT_S)
    assert not queue.close(0)
    assert not queue.put(links[0], b"a", None)
    disk.let_go.set()
    assert queue.close(WAIT_S)
    assert disk.done == [0]
    assert not queue.flush(0)


def test_an_idle_queue_closes_at_once(queue):
    assert queue.flush(0)
    assert queue.close(WAIT_S)


def test_a_bug_ends_writing_not_the_server(queue, disk, small, caplog):
    disk.error = RuntimeError("a bug")
    first, second = small.links(range(4))
    disk.let_go.set()
    with caplog.at_level(logging.ERROR):
        assert queue.put(first, b"a", None)
        assert disk.arrived.wait(WAIT_S)
        assert queue.close(WAIT_S)
    assert "a bug" in caplog.text
    assert not queue.put(second, b"a", None)
    assert not queue.is_pending(first.key)


def test_a_thread_writes_what_is_put(make_store, small):
    tokens = list(range(16))
    store = make_store(threaded=True)
    for link in small.links(tokens):
        assert store.put(link, small.anchor(link), small.residual(link))
    assert store.flush(WAIT_S)
    hit = store.lookup(tokens)
    assert hit.num_complete == 8
    anchors, residuals = small.read(store, hit.pages)
    assert anchors == [small.anchor(link) for link in small.links(tokens)]
    assert residuals == [small.residual(link) for link in small.links(tokens)]


def test_a_store_that_waits_for_bandwidth_closes_at_once(make_store, small):
    store = make_store(threaded=True, write_bytes_per_s=1e-3, write_burst_bytes=1)
    for link in small.links(range(6)):
        assert store.put(link, small.anchor(link))
    store.close(WAIT_S)
    assert make_store().num_pages <= 1


def test_a_disk_that_hangs_keeps_its_files_open(disk, small, make_store, monkeypatch):
    store = make_store(threaded=True)
    monkeypatch.setattr(store._queue, "_commit", disk.commit)
    (link,) = small.links([1, 2])
    assert store.put(link, small.anchor(link))
    assert disk.arrived.wait(WAIT_S)
    closed = []
    monkeypatch.setattr(store, "_close_files", lambda: closed.append(True))
    store.close(0.0)
    store.close(0.0)
    assert not closed
