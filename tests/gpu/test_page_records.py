"""Records of pages that leave a GPU's KV cache and land in it, while kernels are still busy.

A kernel that only spins delays the main stream. A copy that does not wait for that stream then
reads or leaves other bytes.
"""

from __future__ import annotations

import pytest
import torch

from kvspec_testkit.kv.toy_prefixes import empty_records
from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.kv import staged_records
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.page_records import PageRecords, copy_in, copy_out
from sglang_kvspec.planning.capacity import CapacityPlan, PageBytes

DEVICE = torch.device("cuda:0")
NUM_PAGES, NUM_KEPT = 24, 6
GEOMETRY = KVGeometry(4, 8, 128, 64, torch.bfloat16)
# About 10 ms, many times the copy of a few pages.
SPIN_CYCLES = 20_000_000
KINDS = [(target, store) for target in ("exact", "int8") for store in (False, True)]


class Rig:
    """A GpuKVCache whose pages hold random bytes, written by its main stream."""

    def __init__(self, target: str = "exact", store: bool = False) -> None:
        codec = make_codec(
            "uniform4", target=target, page_size=64, head_dim=128, dtype=torch.bfloat16
        )
        cached, hosted = (16, NUM_PAGES) if store else (NUM_PAGES, 0)
        page = PageBytes(1, 1, 1)
        plan = CapacityPlan(NUM_PAGES, 4, cached, hosted, page, "test", kept_anchor_pages=NUM_KEPT)
        self.kv = GpuKVCache(GEOMETRY, codec, plan, DEVICE)
        self.kv.records.warm_up()
        self.kv.warm_up()
        torch.cuda.synchronize()

    def new_records(self, count: int) -> PageRecords:
        empty = empty_records(GEOMETRY, self.kv.codec, count)
        return PageRecords(*(torch.randint_like(part, 256) for part in empty))

    def encode(self, pages: list[int], records: PageRecords | None = None) -> PageRecords:
        """Write records into these pages behind a kernel that spins. Return the records."""
        records, kv = records or self.new_records(len(pages)), self.kv
        anchors, residuals = (part.to(DEVICE) for part in records)
        with kv.placed(encodes=pages):
            slots = kv.residual_slots[pages].long()
            ids = torch.tensor(pages, device=DEVICE)
            torch.cuda.synchronize()
            torch.cuda._sleep(SPIN_CYCLES)
            for layer in range(GEOMETRY.num_layers):
                kv.anchors.layer(layer).index_copy_(0, ids, anchors[:, layer])
                kv.residuals.cache_layer(layer).index_copy_(0, slots, residuals[:, layer])
        return records

    def found(self, pages: list[int]) -> PageRecords:
        """Return the records that kernels find in these pages, once the main stream has run."""
        kv = self.kv
        with kv.placed(pages, by_layer=True):
            ids = torch.tensor(pages, device=DEVICE)
            slots = kv.residual_slots[pages].long()
            anchors, residuals = [], []
            for layer in range(GEOMETRY.num_layers):
                kv.await_layer(layer)
                anchors.append(kv.anchors.layer(layer)[ids])
                residuals.append(kv.residuals.cache_layer(layer)[slots])
        return PageRecords(torch.stack(anchors, 1).cpu(), torch.stack(residuals, 1).cpu())


def same(one: PageRecords, other: PageRecords) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize(("target", "store"), KINDS)
def test_pages_leave_behind_what_still_writes_them(target: str, store: bool) -> None:
    rig = Rig(target, store)
    records = rig.encode([7, 3, 12, 1])
    assert same(copy_out(rig.kv, [7, 3, 12, 1]), records) == [True, True]


@pytest.mark.parametrize(("target", "store"), KINDS)
def test_what_lands_is_found_and_leaves_again(target: str, store: bool) -> None:
    rig = Rig(target, store)
    # More pages than the buffer holds at once.
    pages = list(range(NUM_PAGES, NUM_PAGES - 14, -1))
    records = rig.new_records(len(pages))
    old = rig.encode(pages[:5])
    # These pages are freed, and new records land in them, while they are still being encoded.
    rig.kv.free_pages(pages[:5])
    copy_in(rig.kv, pages, records)
    assert same(rig.found(pages), records) == [True, True]
    assert same(copy_out(rig.kv, pages), records) == [True, True]
    assert same(PageRecords(*(part[:5] for part in records)), old) == [False, False]


@pytest.mark.parametrize("pages_at_once", [1, 3])
def test_a_small_buffer(monkeypatch: pytest.MonkeyPatch, pages_at_once: int) -> None:
    rig = Rig()
    page_bytes = rig.new_records(1).residuals.nbytes
    monkeypatch.setattr(staged_records, "BUFFER_BYTES", pages_at_once * page_bytes)
    records = rig.encode([4, 9, 2, 17, 5, 1, 8])
    found = copy_out(rig.kv, [4, 9, 2, 17, 5, 1, 8])
    assert same(found, records) == [True, True]
    rig.kv.free_pages([4, 9, 2, 17, 5, 1, 8])
    copy_in(rig.kv, [3, 4, 5, 6, 7, 8, 9], found)
    assert same(rig.found([3, 4, 5, 6, 7, 8, 9]), records) == [True, True]


def test_landing_waits_for_nothing_and_leaving_is_pinned() -> None:
    rig = Rig()
    rig.encode([20])
    assert all(part.is_pinned() for part in copy_out(rig.kv, [20]))
    assert len(copy_out(rig.kv, [])) == 0
    records = PageRecords(*(part.pin_memory() for part in rig.new_records(6)))
    torch.cuda._sleep(SPIN_CYCLES)
    end_of_spin = torch.cuda.Event()
    end_of_spin.record()
    copy_in(rig.kv, [1, 2, 3, 4, 5, 6], records)
    assert not end_of_spin.query(), "landing waited for the GPU"
    assert same(rig.found([1, 2, 3, 4, 5, 6]), records) == [True, True]


@pytest.mark.parametrize(("target", "store"), KINDS)
def test_kept_anchors_outlive_their_pages(target: str, store: bool) -> None:
    """Keep and restore anchors while a kernel still delays the first encoding."""
    # Compile the kernels first: a compilation takes longer than the spin.
    _keep_and_restore(target, store)
    waited = not _keep_and_restore(target, store)
    assert store or not waited, "keeping or restoring waited for the GPU"


def _keep_and_restore(target: str, store: bool) -> bool:
    """Keep anchors and restore them. Return whether the GPU was still spinning at the end."""
    rig = Rig(target, store)
    pages, slots = [7, 3, 12], [5, 0, 2]
    # Pin memory before the kernel spins: pinning takes CPU time, which would outlast the spin.
    records, others = (
        PageRecords(*(part.pin_memory() for part in rig.new_records(3))) for _ in range(2)
    )
    rig.encode(pages, records)
    end_of_spin = torch.cuda.Event()
    end_of_spin.record()
    rig.kv.records.keep_anchors(pages, slots)
    rig.kv.free_pages(pages)
    # Other pages land where the first pages were. The kept anchors then land in new pages, and
    # their slots are taken by the other pages.
    copy_in(rig.kv, pages, others)
    _land(rig.kv, [20, 21, 22], records.residuals, slots)
    rig.kv.records.keep_anchors(pages, slots)
    held_up = not end_of_spin.query()
    assert same(rig.found([20, 21, 22]), records) == [True, True]
    assert same(rig.found(pages), others) == [True, True]
    rig.kv.free_pages([20])
    half = PageRecords(*(part[1:2] for part in others))
    _land(rig.kv, [20], half.residuals, slots[1:2])
    assert same(rig.found([20]), half) == [True, True]
    return held_up


def _land(kv: GpuKVCache, pages: list[int], residuals: torch.Tensor, slots: list[int]) -> None:
    """Fill free pages with kept anchors and the given residuals."""
    kv.begin_landing(pages)
    kv.records.restore_anchors(slots, pages)
    kv.records.write_residuals(pages, residuals)
    kv.finish_encode(pages)
