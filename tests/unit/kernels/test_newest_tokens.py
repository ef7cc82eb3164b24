"""The newest tokens of a request, copied from one device's recent window to another's while kernels
run. A full last page is encoded where it arrives."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.page_records import copy_out
from sglang_kvspec.planning.capacity import CapacityPlan, PageBytes

# Small sizes for the interpreter.
SIZE, HEADS, HEAD_DIM, LAYERS = 64, 1, 16, 2
# About 10 ms, many times the copy of a page.
SPIN_CYCLES = 20_000_000

kinds = pytest.mark.parametrize(("target", "store"), [("exact", 0), ("exact", 1), ("int8", 0)])


@pytest.fixture
def make_kv(device):
    def make(target, store):
        settings = {"page_size": SIZE, "head_dim": HEAD_DIM, "dtype": torch.bfloat16}
        geometry = KVGeometry(LAYERS, HEADS, HEAD_DIM, SIZE, torch.bfloat16)
        cached, hosted = (4, 8) if store else (8, 0)
        plan = CapacityPlan(8, 4, cached, hosted, PageBytes(1, 1, 1), "test")
        codec = make_codec("uniform4", target=target, **settings)
        return GpuKVCache(geometry, codec, plan, device)

    return make


@pytest.fixture
def spin(device):
    """Function that delays the main stream of a GPU."""
    on_device = device.type == "cuda"
    return partial(torch.cuda._sleep, SPIN_CYCLES) if on_device else lambda: None


def some_tokens(count):
    rng = torch.Generator().manual_seed(0)
    return torch.randn((LAYERS, 2, count, HEADS, HEAD_DIM), generator=rng).bfloat16()


@kinds
@pytest.mark.parametrize("count", [1, SIZE - 1])
def test_tokens_arrive_unchanged(make_kv, spin, target, store, count):
    sender, receiver = make_kv(target, store), make_kv(target, store)
    tokens = some_tokens(count)
    spin()
    sender.records.write_plain(3, tokens)
    sent = sender.records.read_plain(3, count)
    assert torch.equal(sent, tokens)
    spin()
    receiver.records.write_plain(5, sent)
    assert torch.equal(receiver.records.read_plain(5, count), tokens)
    assert not receiver.is_encoded(5)
    for kv in (sender, receiver):
        kv.check_integrity()


@kinds
def test_a_full_page_has_the_same_records_on_both(make_kv, spin, target, store):
    sender, receiver = make_kv(target, store), make_kv(target, store)
    tokens = some_tokens(SIZE)
    sender.records.write_plain(3, tokens)
    spin()
    receiver.records.write_plain(5, tokens)
    assert torch.equal(receiver.records.read_plain(5, SIZE), tokens)
    assert all(map(torch.equal, copy_out(sender, [3]), copy_out(receiver, [5])))
    if target == "exact":
        slot = int(receiver.residual_slots[5])
        for layer in range(LAYERS):
            for part, wanted in zip(receiver.exact_pages(layer), tokens[layer], strict=True):
                assert torch.equal(part[slot].cpu().transpose(0, 1), wanted)
    # The page leaves the window as any other page.
    receiver.move_out_of_window([5])
    left = receiver.records.read_plain(5, SIZE - 1)
    if target == "exact":
        assert torch.equal(left, tokens[:, :, : SIZE - 1])
    else:
        assert left is None
