"""Residuals in pinned host memory on a GPU's own streams: fences, and attention over a small cache.

A kernel that only spins delays a stream. Work that lacks its fence then runs too early, and the
test sees it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kvspec_testkit.kv.slow_streams import SPIN_CYCLES, DeafStream, spin
from kvspec_testkit.runtime.attention_pair import AttentionPair
from sglang_kvspec.kv.copy_streams import CopyStreams, Event, make_copy_streams
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.host_copies import HostCopies
from sglang_kvspec.kv.host_store import RawStore
from sglang_kvspec.kv.record_pool import RecordPool

DEVICE = torch.device("cuda:0")
LAYERS, HEADS, RECORD_BYTES = 4, 8, 32768
# Both sides round to bf16 (2^-9 relative). The GPU computes 8-bit pages in fp16. A wrong page, slot
# or length gives errors of the order of 1.
TOLERANCE = 0.02


class Rig:
    """A cache of 3 slots and a store of 4 pages. All bytes are 255, except those of page 3 in the
    store, which are 33."""

    def __init__(self, deaf: str | None = None) -> None:
        copy_streams = make_copy_streams(DEVICE)
        if deaf is not None:
            parts = {name: getattr(copy_streams, name) for name in ("main", "to_host", "to_device")}
            parts[deaf] = DeafStream(DEVICE, parts[deaf]._stream)
            copy_streams = CopyStreams(**parts)
        self.copy_streams = copy_streams
        self.cache = self.pool(3, DEVICE)
        self.store = self.pool(4, torch.device("cpu"), pinned=True)
        self.store.page(3).fill_(33)
        self.copies = HostCopies(RawStore(self.cache, self.store), copy_streams)
        torch.cuda.synchronize()

    @staticmethod
    def pool(num_slots: int, device: torch.device, pinned: bool = False) -> RecordPool:
        pool = RecordPool(
            LAYERS, num_slots, HEADS, RECORD_BYTES, device, pinned=pinned, by_page=True
        )
        for slot in range(num_slots):
            pool.page(slot).fill_(255)
        return pool


def copy_out_behind_the_encode(rig: Rig) -> list[tuple[torch.Tensor, int]]:
    spin(rig.copy_streams.main)
    rig.cache.page(1).fill_(7)
    rig.copies.copy_out([(0, 1)])
    return [(rig.store.page(0), 7)]


def fetch_into_a_slot_that_is_being_read(rig: Rig) -> list[tuple[torch.Tensor, int]]:
    rig.cache.page(1).fill_(5)
    spin(rig.copy_streams.main)
    read = rig.cache.page(1).clone()
    rig.copies.fetch([(3, 1)])
    return [(read, 5), (rig.cache.page(1), 33)]


def read_behind_the_fetch(rig: Rig) -> list[tuple[torch.Tensor, int]]:
    spin(rig.copy_streams.to_device)
    done = rig.copies.fetch([(3, 0)])
    rig.copies.main_waits([done])
    return [(rig.cache.page(0).clone(), 33)]


def read_layers_behind_their_fetch(rig: Rig) -> list[tuple[torch.Tensor, int]]:
    spin(rig.copy_streams.to_device)
    seen = []
    for layer, event in enumerate(rig.copies.fetch_by_layer([(3, 0), (2, 2)])):
        rig.copies.main_waits([event])
        seen.append((rig.cache.layer(layer)[0].clone(), 33))
    return seen


def fetch_layers_into_a_slot_that_is_being_read(rig: Rig) -> list[tuple[torch.Tensor, int]]:
    rig.cache.page(1).fill_(5)
    spin(rig.copy_streams.main)
    read = rig.cache.page(1).clone()
    rig.copies.fetch_by_layer([(3, 1)])
    return [(read, 5), (rig.cache.page(1), 33)]


def write_a_slot_that_is_being_copied_out(rig: Rig) -> list[tuple[torch.Tensor, int]]:
    """Write the slot of a page that was freed while its copy to the store had not run."""
    rig.cache.page(2).fill_(9)
    spin(rig.copy_streams.to_host)
    rig.copies.copy_out([(1, 2)])
    rig.copies.main_writes([2])
    rig.cache.page(2).fill_(10)
    return [(rig.store.page(1), 9), (rig.cache.page(2), 10)]


def fetch_what_is_being_copied_out(rig: Rig) -> list[tuple[torch.Tensor, int]]:
    """Fetch an evicted page into another slot while its copy to the store has not run."""
    rig.cache.page(0).fill_(11)
    spin(rig.copy_streams.to_host)
    rig.copies.copy_out([(2, 0)])
    rig.copies.fetch([(2, 1)])
    return [(rig.cache.page(1), 11)]


def fetch_into_a_slot_that_is_being_copied_out(rig: Rig) -> list[tuple[torch.Tensor, int]]:
    rig.cache.page(0).fill_(12)
    spin(rig.copy_streams.to_host)
    rig.copies.copy_out([(2, 0)])
    rig.copies.fetch([(3, 0)])
    return [(rig.store.page(2), 12), (rig.cache.page(0), 33)]


# Each case with the stream that must wait.
FENCES: list[tuple[Callable[[Rig], list[tuple[torch.Tensor, int]]], str | None]] = [
    (copy_out_behind_the_encode, "to_host"),
    (fetch_into_a_slot_that_is_being_read, "to_device"),
    (read_behind_the_fetch, "main"),
    (read_layers_behind_their_fetch, "main"),
    # None: without this fence the kernel would fault, on indices that have not arrived.
    (fetch_layers_into_a_slot_that_is_being_read, None),
    (write_a_slot_that_is_being_copied_out, "main"),
    (fetch_what_is_being_copied_out, "to_device"),
    (fetch_into_a_slot_that_is_being_copied_out, "to_device"),
]


def wrong(outcome: list[tuple[torch.Tensor, int]]) -> list[int]:
    torch.cuda.synchronize()
    return [index for index, (found, value) in enumerate(outcome) if bool((found != value).any())]


@pytest.mark.parametrize(
    ("act", "waiting"), FENCES, ids=lambda part: getattr(part, "__name__", str(part))
)
def test_a_fence(act: Callable[[Rig], list[tuple[torch.Tensor, int]]], waiting: str | None) -> None:
    """Check that a fence holds, and that the contents are wrong without it."""
    # Compile first: a compilation would outlast the spin.
    act(Rig())
    assert wrong(act(Rig())) == []
    if waiting is not None:
        assert wrong(act(Rig(deaf=waiting))) != []


def test_the_cpu_waits_for_nothing() -> None:
    rig = Rig()
    # The first call compiles, and allocates its buffers.
    rig.copies.main_waits(rig.copies.fetch_by_layer([(3, 0)]))
    torch.cuda.synchronize()
    spin(rig.copy_streams.main)
    end_of_spin = rig.copy_streams.main.mark()
    for _ in range(3):
        rig.copies.main_writes([0, 1, 2])
        rig.copies.copy_out([(0, 0), (1, 1), (2, 2)])
        rig.copies.main_waits([rig.copies.fetch([(3, 0), (2, 1)])])
        rig.copies.main_waits(rig.copies.fetch_by_layer([(3, 2)]))
    assert not end_of_spin.query(), "enqueueing waited for the GPU"
    torch.cuda.synchronize()


def test_the_store_is_pinned_and_no_larger_than_asked_for() -> None:
    rig = Rig()
    assert rig.store.page(0).is_pinned()
    assert rig.store.nbytes == 4 * LAYERS * HEADS * RECORD_BYTES


@pytest.mark.parametrize("seed", range(4))
def test_pages_under_random_use(seed: int) -> None:
    """Compare the contents at the end only, so that the CPU never waits in between."""
    rng, rig = random.Random(seed), Rig()
    copy_streams = (rig.copy_streams.main, rig.copy_streams.to_host, rig.copy_streams.to_device)
    content: dict[int, int] = {3: 33}
    slots: dict[int, int] = {}
    arriving: dict[int, Event] = {}
    seen: list[tuple[torch.Tensor, int]] = []
    for step in range(400):
        if rng.random() < 0.1:
            with torch.cuda.stream(rng.choice(copy_streams).stream):
                torch.cuda._sleep(SPIN_CYCLES // 20)
        free = sorted(set(range(3)) - set(slots.values()))
        stored = [page for page in content if page not in slots]
        unborn = [page for page in range(3) if page not in content]
        act = rng.choice(["encode", "fetch", "read", "read", "evict", "die"])
        if act == "encode" and free and unborn:
            page, slot = rng.choice(unborn), rng.choice(free)
            content[page], slots[page] = step % 250, slot
            rig.copies.main_writes([slot])
            rig.cache.page(slot).fill_(step % 250)
            rig.copies.copy_out([(page, slot)])
        elif act == "fetch" and free and stored:
            page, slot = rng.choice(stored), rng.choice(free)
            slots[page] = slot
            by_layer = rng.random() < 0.3
            arriving[page] = (
                rig.copies.fetch_by_layer([(page, slot)])[-1]
                if by_layer
                else rig.copies.fetch([(page, slot)])
            )
        elif act == "read" and slots:
            page = rng.choice(sorted(slots))
            if page in arriving:
                rig.copies.main_waits([arriving.pop(page)])
            # Read one layer of the page, as a kernel does.
            seen.append((rig.cache.layer(step % LAYERS)[slots[page]].clone(), content[page]))
        elif act in ("evict", "die") and slots:
            page = rng.choice(sorted(slots))
            del slots[page]
            arriving.pop(page, None)
            if act == "die" and page != 3:
                del content[page]
    assert len(seen) > 50
    seen += [(rig.store.page(page), value) for page, value in content.items()]
    assert wrong(seen) == []


def make_pair(codec: str, target: str, cache_pages: int, packs: bool = False) -> AttentionPair:
    if target == "exact":
        pytest.importorskip("flashinfer")
    return AttentionPair(
        codec,
        target,
        KVGeometry(2, 2, 128, 64, torch.bfloat16),
        DEVICE,
        num_qo_heads=8,
        num_pages=60,
        cache_pages=cache_pages,
        tolerance=TOLERANCE,
        packs=packs,
    )


@pytest.mark.parametrize(
    ("codec", "target", "packs"),
    [
        ("log4", "exact", False),
        ("uniform4", "exact", False),
        ("uniform4", "exact", True),
        ("log4", "int8", False),
        ("uniform4", "int8", False),
    ],
)
def test_attention_over_a_small_cache(codec: str, target: str, packs: bool) -> None:
    """Let requests arrive, verify in turns and leave, while a kernel delays the main stream before
    each forward."""
    rng, pair = random.Random(1), make_pair(codec, target, cache_pages=12, packs=packs)
    for step in range(40):
        torch.cuda._sleep(SPIN_CYCLES // 10)
        names = sorted(pair.committed)
        if len(names) < 4:
            pair.prefill(**{f"r{step}": rng.randint(1, 560)})
        elif rng.random() < 0.15:
            pair.free(rng.choice(names))
        elif rng.random() < 0.2:
            name = rng.choice([n for n in names if pair.committed[n] < 500] or names[:1])
            if pair.committed[name] < 500:
                pair.prefill(**{name: rng.randint(1, 100)})
        else:
            name = rng.choice([n for n in names if pair.committed[n] < 640] or names[:1])
            length = rng.randint(1, 20)
            pair.verify({name: rng.randint(1, length)}, **{name: length})
    assert pair.kv.residuals.bytes_fetched
    assert len(pair.encoded(pair.pages)) > 12


def test_planned_fetches_are_used_by_the_next_forward() -> None:
    pair = make_pair("uniform4", "int8", cache_pages=8)
    pair.prefill(a=300)
    pair.prefill(b=400)
    residuals, pages = pair.kv.residuals, pair.encoded("a")
    missing = residuals.missing(pages)
    assert missing
    residuals.evict([p for p in pair.encoded("b") if p in residuals.cache_slots][: len(missing)])
    torch.cuda._sleep(SPIN_CYCLES)
    residuals.start_fetch(missing)
    before = residuals.bytes_fetched
    pair.verify(a=5)
    assert residuals.bytes_fetched == before, "they were fetched again"
