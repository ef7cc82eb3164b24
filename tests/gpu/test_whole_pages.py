"""Pages that cross in one piece between the KV caches of two GPU servers, as the baselines of
--kvspec-transfer send them. Bytes and values equal those of the codecs on a CPU."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.codecs.wire import make_wire_codec
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.page_records import PageRecords, copy_out
from sglang_kvspec.planning.capacity import CapacityPlan, PageBytes
from sglang_kvspec.runtime.disaggregation import page_wire
from sglang_kvspec.runtime.disaggregation.page_wire import WholeWire
from sglang_kvspec.transport import Stream

DEVICE = torch.device("cuda:0")
NUM_PAGES, COUNT = 44, 37
GEOMETRY = KVGeometry(3, 2, 128, 64, torch.bfloat16)
SPIN_CYCLES = 20_000_000
SENT = list(range(1, COUNT + 1))
LANDED = list(range(NUM_PAGES, NUM_PAGES - COUNT, -1))
MODES = ("full", "int8", "int4", "cachegen")


def make_kv(store: bool) -> GpuKVCache:
    """Make a KV cache of one server. store: with a residual cache of fewer pages than cross."""
    codec = make_codec("uniform4", target="exact", page_size=64, head_dim=128, dtype=torch.bfloat16)
    cached, hosted = (20, NUM_PAGES) if store else (NUM_PAGES, 0)
    plan = CapacityPlan(NUM_PAGES, 4, cached, hosted, PageBytes(1, 1, 1), "test")
    kv = GpuKVCache(GEOMETRY, codec, plan, DEVICE)
    kv.records.warm_up()
    kv.warm_up()
    return kv


def make_pages() -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of COUNT pages, on the CPU."""
    shape = (2, COUNT, GEOMETRY.num_layers, 64, GEOMETRY.num_kv_heads, 128)
    k, v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return k * 3 + 1, v


def expected_records(kv: GpuKVCache, k: torch.Tensor, v: torch.Tensor) -> PageRecords:
    """Return the records that the codec encodes from pages, on the CPU."""
    record = kv.codec.encode(k.flatten(0, 1), v.flatten(0, 1))
    shape = (len(k), GEOMETRY.num_layers)
    return PageRecords(record.anchor.unflatten(0, shape), record.residual.unflatten(0, shape))


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_pages_cross(monkeypatch: pytest.MonkeyPatch, mode: str, store: bool) -> None:
    # A small limit, so that the pages cross in several portions.
    monkeypatch.setattr(page_wire, "AT_ONCE_BYTES", 17 * GEOMETRY.plain_page_bytes)
    codec = make_wire_codec(mode, GEOMETRY)
    sender, receiver = make_kv(store), make_kv(store)
    k, v = make_pages()
    sender.write_whole(SENT, k.to(DEVICE), v.to(DEVICE))
    parts = WholeWire(sender, codec, drafts=True).pack(Stream.ANCHOR, SENT)
    payloads = [payload for (payload,) in parts]
    on_cpu = [codec.encode(*page) for page in zip(k, v, strict=True)]
    assert all(map(torch.equal, payloads, on_cpu))
    # The GPU is still busy when pages land.
    torch.cuda._sleep(SPIN_CYCLES)
    WholeWire(receiver, codec, drafts=True).land(Stream.ANCHOR, LANDED, parts)
    decoded = [torch.stack(part) for part in zip(*map(codec.decode, payloads), strict=True)]
    for got, want in zip(receiver.records.read_whole(LANDED), decoded, strict=True):
        assert torch.equal(got.cpu(), want)
    found, wanted = copy_out(receiver, LANDED), expected_records(receiver, *decoded)
    assert torch.equal(found.anchors, wanted.anchors)
    assert torch.equal(found.residuals, wanted.residuals)
    receiver.check_integrity()


@pytest.mark.parametrize("mode", ["full", "int8", "int4"])
def test_landing_does_not_wait_for_the_gpu(mode: str) -> None:
    codec, kv = make_wire_codec(mode, GEOMETRY), make_kv(store=False)
    k, v = make_pages()
    payloads = [[payload] for payload in codec.encode_pages(k, v)]
    wire = WholeWire(kv, codec, drafts=True)
    # The first landing compiles, and allocates memory.
    wire.land(Stream.ANCHOR, LANDED, payloads)
    kv.free_pages(LANDED)
    torch.cuda.synchronize()
    torch.cuda._sleep(40 * SPIN_CYCLES)
    end_of_spin = torch.cuda.Event()
    end_of_spin.record()
    wire.land(Stream.ANCHOR, LANDED, payloads)
    assert not end_of_spin.query(), "landing waited for the GPU"
    torch.cuda.synchronize()
