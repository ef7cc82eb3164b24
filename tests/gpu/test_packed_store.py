"""Packed residuals in pinned host memory on a GPU's own streams: what each stream waits for.

A kernel that only spins delays a stream. Work that lacks its fence then runs too early, and the
test sees it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvspec_testkit.kv.slow_streams import DeafStream, spin
from sglang_kvspec.codecs import make_codec
from sglang_kvspec.kv.copy_streams import CopyStreams, make_copy_stream, make_copy_streams
from sglang_kvspec.kv.host_copies import HostCopies
from sglang_kvspec.kv.packed_store import PackedStore
from sglang_kvspec.kv.record_pool import RecordPool

DEVICE = torch.device("cuda:0")
LAYERS, HEADS, PAGE_SIZE, HEAD_DIM = 4, 8, 64, 128
NUM_PAGES, NUM_SLOTS = 4, 3
# About 0.3 s: the CPU takes more than 10 ms to enqueue a few fetches.
LONG_SPINS = 30
# Tensors of pages or layers, and what they should hold.
Outcome = list[tuple[torch.Tensor, torch.Tensor]]


class Rig:
    """A cache of 3 slots, and a store of 4 settled pages. content: raw residuals of each page.
    frees: the store has anchors of its own."""

    def __init__(self, deaf: str | None = None, *, frees: bool = False) -> None:
        streams, link = make_copy_streams(DEVICE), make_copy_stream(DEVICE)
        parts = {name: getattr(streams, name) for name in ("main", "to_host", "to_device")}
        parts["link"] = link
        if deaf is not None:
            parts[deaf] = DeafStream(DEVICE, parts[deaf]._stream)
        self.main, self.to_device, self.link = (
            parts[name] for name in ("main", "to_device", "link")
        )
        codec = make_codec(
            "uniform4",
            target="exact",
            page_size=PAGE_SIZE,
            head_dim=HEAD_DIM,
            dtype=torch.bfloat16,
            packs=True,
        )
        assert codec.packed is not None, "packs=True gives a packed form"
        anchors = RecordPool(LAYERS, NUM_PAGES, HEADS, codec.anchor_bytes, DEVICE)
        self.cache = RecordPool(
            LAYERS, NUM_SLOTS, HEADS, codec.residual_bytes, DEVICE, by_page=True
        )
        pool = None if frees else lambda: anchors
        store = PackedStore(
            self.cache, pool, codec.packed, NUM_PAGES, parts.pop("link"), pinned=True
        )
        self.copies = HostCopies(store, CopyStreams(**parts))
        self.content: list[torch.Tensor] = []
        generator = torch.Generator(DEVICE).manual_seed(1)
        for page in range(NUM_PAGES):
            shape = (2, LAYERS, PAGE_SIZE, HEADS, HEAD_DIM)
            k, v = torch.randn(shape, device=DEVICE, generator=generator).bfloat16()
            # Records of one head of the last page do not fit.
            if page == NUM_PAGES - 1:
                v[0, :, 0] = torch.exp2(torch.linspace(-16, 14, HEAD_DIM, device=DEVICE)).bfloat16()
            encoded = codec.encode(k, v)
            anchors.write_pages(torch.tensor([page], device=DEVICE), encoded.anchor[None])
            self.cache.page(0).copy_(encoded.residual)
            self.content.append(encoded.residual.clone())
            torch.cuda.synchronize()
            self.copies.copy_out([(page, 0)])
            self.copies.settle([page], lambda _: 0)
        for slot in range(NUM_SLOTS):
            self.cache.page(slot).fill_(255)
        torch.cuda.synchronize()


def unpack_what_the_link_has_brought(rig: Rig) -> Outcome:
    # Buffers may lie where those of another rig held this very page.
    for pair in ((2, 1), (1, 2)):
        rig.copies.main_waits([rig.copies.fetch([pair])])
    torch.cuda.synchronize()
    spin(rig.link)
    rig.copies.main_waits([rig.copies.fetch([(3, 0)])])
    return [(rig.cache.page(0).clone(), rig.content[3])]


def bring_records_into_a_buffer_that_was_unpacked(rig: Rig) -> Outcome:
    spin(rig.to_device)
    pairs = ((3, 0), (2, 1), (1, 2))
    rig.copies.main_waits([rig.copies.fetch([pair]) for pair in pairs])
    return [(rig.cache.page(slot).clone(), rig.content[page]) for page, slot in pairs]


def read_layers_behind_their_fetch(rig: Rig) -> Outcome:
    spin(rig.link)
    seen = []
    for layer, event in enumerate(rig.copies.fetch_by_layer([(3, 0), (1, 2)])):
        rig.copies.main_waits([event])
        for page, slot in ((3, 0), (1, 2)):
            seen.append((rig.cache.layer(layer)[slot].clone(), rig.content[page][layer]))
    return seen


# Each case with the stream that must wait.
FENCES: list[tuple[Callable[[Rig], Outcome], str]] = [
    (unpack_what_the_link_has_brought, "to_device"),
    (bring_records_into_a_buffer_that_was_unpacked, "link"),
    (read_layers_behind_their_fetch, "main"),
]


def wrong(outcome: Outcome) -> list[int]:
    torch.cuda.synchronize()
    return [index for index, pair in enumerate(outcome) if not torch.equal(*pair)]


BOTH = pytest.mark.parametrize("frees", [False, True], ids=["pooled", "stored"])


@BOTH
@pytest.mark.parametrize(
    ("act", "waiting"), FENCES, ids=lambda part: getattr(part, "__name__", str(part))
)
def test_a_fence(act: Callable[[Rig], Outcome], waiting: str, frees: bool) -> None:
    """Check that a fence holds, and that the contents are wrong without it."""
    # Compile first: a compilation would outlast the spin.
    act(Rig(frees=frees))
    assert wrong(act(Rig(frees=frees))) == []
    assert wrong(act(Rig(deaf=waiting, frees=frees))) != []


@BOTH
def test_the_cpu_waits_for_nothing(frees: bool) -> None:
    rig = Rig(frees=frees)
    # The first calls compile, and allocate buffers.
    for _ in range(2):
        rig.copies.main_waits([rig.copies.fetch([(3, 0), (2, 1)])])
        rig.copies.main_waits(rig.copies.fetch_by_layer([(3, 2)]))
    torch.cuda.synchronize()
    for _ in range(LONG_SPINS):
        spin(rig.main)
    end_of_spin = rig.main.mark()
    for _ in range(3):
        rig.copies.main_waits([rig.copies.fetch([(3, 0), (2, 1)])])
        rig.copies.main_waits(rig.copies.fetch_by_layer([(3, 2)]))
    assert not end_of_spin.query(), "enqueueing waited for the GPU"
    torch.cuda.synchronize()
