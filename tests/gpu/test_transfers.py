"""Values for the device arrive while residuals are fetched, and do not wait for those copies."""

from __future__ import annotations

import torch

from sglang_kvspec.kv.copy_streams import make_copy_streams
from sglang_kvspec.kv.host_copies import HostCopies
from sglang_kvspec.kv.host_store import RawStore
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.transfers import MOST_BYTES, send_into, sent_together, to_device

DEVICE = torch.device("cuda:0")
# Pages of an 8B shape: 2 MiB each, 0.25 GiB together, about 5 ms to copy.
NUM_PAGES, LAYERS, HEADS, RECORD_BYTES = 128, 32, 8, 8192


def test_values_do_not_wait_for_pages() -> None:
    shape = (HEADS, RECORD_BYTES)
    cache = RecordPool(LAYERS, NUM_PAGES, *shape, DEVICE, by_page=True)
    store = RecordPool(
        LAYERS, NUM_PAGES, *shape, torch.device("cpu"), pinned=True, by_page=True
    )  # fmt: skip
    copies = HostCopies(RawStore(cache, store), make_copy_streams(DEVICE))
    pairs = [(page, (7 * page) % NUM_PAGES) for page in range(NUM_PAGES)]
    to_device(DEVICE, torch.zeros(1))
    copies.fetch(pairs).synchronize()
    values = [torch.arange(1000 + i) for i in range(20)]
    done = [copies.fetch(pairs) for _ in range(2)][-1]
    arrived = sent_together(DEVICE, values)
    torch.cuda.current_stream().synchronize()
    assert not done.query(), "values came after the pages"
    assert all(torch.equal(a.cpu(), b) for a, b in zip(arrived, values, strict=True))
    done.synchronize()


def test_all_sizes_arrive() -> None:
    for count in (0, 1, 3, 1000, MOST_BYTES // 8, MOST_BYTES // 8 + 1, MOST_BYTES):
        for dtype in (torch.int64, torch.int32, torch.uint8):
            values = torch.randint(0, 200, (count,)).to(dtype)
            assert torch.equal(to_device(DEVICE, values).cpu(), values), (count, dtype)
        target = torch.full((count + 1,), 5, dtype=torch.int32, device=DEVICE)
        send_into([(target[:count], torch.arange(count))])
        assert torch.equal(target[:count].cpu(), torch.arange(count).int())
        assert int(target[count]) == 5


def test_many_at_once() -> None:
    sizes = (5, 0, MOST_BYTES // 8, 3, *[MOST_BYTES // 8 - 1] * 9, MOST_BYTES, 1)
    values = [torch.randint(1 << 40, (count,)) for count in sizes]
    there = sent_together(DEVICE, values)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(there, values, strict=True))
    targets = [torch.full((count + 2,), 9, device=DEVICE) for count in sizes]
    send_into([(target[1:-1], each) for target, each in zip(targets, values, strict=True)])
    for target, each in zip(targets, values, strict=True):
        assert torch.equal(target[1:-1].cpu(), each)
        assert target[[0, -1]].tolist() == [9, 9]


def test_more_than_the_memory_holds_in_all() -> None:
    values = [torch.full((MOST_BYTES // 16,), i) for i in range(100)]
    torch.cuda._sleep(20_000_000)
    arrived = [to_device(DEVICE, each) for each in values]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(arrived, values, strict=True))
