"""Residuals that a host store holds in the packed form: what comes back is what was encoded."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.kv import packed_store
from sglang_kvspec.kv.copy_streams import SyncStream
from sglang_kvspec.kv.host_copies import HostCopies
from sglang_kvspec.kv.packed_store import PackedStore
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.planning.record_bytes import spare_rows, stored_page_bytes

LAYERS, HEADS, PAGE, HEAD_DIM = 3, 8, 32, 16
RECORDS = LAYERS * HEADS
BF16 = torch.bfloat16


class Hosted:
    """A GpuKVCache of a few pages with a packed store. `content`: raw residuals of its pages.
    frees: the cache has room for the anchors of two pages only."""

    def __init__(self, make, cache_pages=4, num_pages=8, packs=True, frees=False):
        self.kv = make(
            store=True,
            encodes=True,
            packs=packs,
            dtype=BF16,
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            num_pages=num_pages,
            cache_pages=cache_pages,
            anchor_pages=2 if frees else None,
        )
        self.store = self.kv.residuals.store
        codec = self.kv.codec
        # Bytes that the link moves for a record that fits.
        self.record_bytes = codec.packed.record_bytes + frees * codec.anchor_bytes if packs else 0
        self.content: dict[int, torch.Tensor] = {}
        self.rng = torch.Generator().manual_seed(1)

    def encode(self, **unfit):
        """Encode pages p1, p2, ... of which so many records do not fit."""
        numbers = {int(name[1:]): count for name, count in unfit.items()}
        k, v = torch.randn((2, len(numbers), LAYERS, PAGE, HEADS, HEAD_DIM), generator=self.rng).to(
            BF16
        )
        for row, count in enumerate(numbers.values()):
            for record in torch.randperm(RECORDS, generator=self.rng)[:count].tolist():
                layer, head = divmod(record, HEADS)
                wide = 2.0 ** (30 * torch.rand((PAGE, HEAD_DIM), generator=self.rng) - 16)
                v[row, layer, :, head] = wide.to(BF16)
        pages = list(numbers)
        self.kv.write_whole(pages, k, v)
        for row, page in enumerate(pages):
            layers = [self.kv.codec.encode(k[row, n, None], v[row, n, None]) for n in range(LAYERS)]
            self.content[page] = torch.cat([made.residual for made in layers])

    def evict(self):
        residuals = self.kv.residuals
        residuals.evict(residuals.table.pages_in(self.content, ResidualState.RESIDENT))

    def fetch(self, *pages, by_layer):
        """Fetch pages into the cache, and compare every byte there."""
        residuals = self.kv.residuals
        residuals.cache.pages.fill_(255)
        with self.kv.placed(pages, by_layer=by_layer):
            for layer in range(LAYERS):
                self.kv.await_layer(layer)
                for page in pages:
                    slot = residuals.cache_slots.slot_of(page)
                    found = residuals.cache_layer(layer)[slot]
                    assert torch.equal(found, self.content[page][layer]), f"{page=}, {layer=}"

    def free(self, *pages):
        self.kv.free_pages(pages)
        for page in pages:
            del self.content[page]


@pytest.fixture
def hosted(make_device_kv):
    return partial(Hosted, make_device_kv)


SPARE = spare_rows(RECORDS)
by_layer = pytest.mark.parametrize("by_layer", [False, True], ids=["by page", "by layer"])
frees = pytest.mark.parametrize("frees", [False, True], ids=["pooled", "stored"])


@frees
@by_layer
def test_pages_come_back_bit_by_bit(hosted, by_layer, frees):
    """None of their records fits at worst, and some need more V than their rows have."""
    cache = hosted(frees=frees)
    assert SPARE == 2
    cache.encode(p3=0, p5=1, p1=SPARE)
    cache.encode(p7=SPARE + 1, p2=RECORDS)
    cache.evict()
    assert cache.store.num_unfit == 1 + SPARE + SPARE + 1 + RECORDS
    cache.fetch(7, 3, 2, 5, by_layer=by_layer)
    cache.evict()
    cache.fetch(1, 2, by_layer=by_layer)
    cache.kv.check_integrity()


@frees
@by_layer
def test_pages_without_records_that_do_not_fit(hosted, by_layer, frees):
    cache = hosted(frees=frees)
    cache.encode(p1=0, p2=0)
    cache.evict()
    cache.fetch(2, 1, by_layer=by_layer)
    moved = 2 * RECORDS * cache.record_bytes
    assert cache.store.link_bytes([1, 2]) == moved
    assert cache.kv.residuals.bytes_fetched == moved


@frees
def test_the_link_moves_v_of_records_that_do_not_fit(hosted, frees):
    cache = hosted(frees=frees)
    cache.encode(p4=SPARE + 2)
    cache.evict()
    packed = cache.kv.codec.packed
    moved = RECORDS * cache.record_bytes + (SPARE + 2) * packed.raw_v_bytes
    assert cache.store.link_bytes([4]) == moved
    cache.fetch(4, by_layer=False)
    assert cache.kv.residuals.take_fetch_times()[0][0] == moved


@frees
def test_a_store_takes_the_bytes_that_are_planned(hosted, frees):
    cache = hosted(num_pages=8, frees=frees)
    store, packed = cache.store, cache.kv.codec.packed
    pools = [store._records, store._spare, *([store._anchors._pool] if frees else [])]
    planned = stored_page_bytes(RECORDS, packed.record_bytes, packed.raw_v_bytes)
    planned += frees * RECORDS * cache.kv.codec.anchor_bytes
    assert sum(pool.nbytes for pool in pools) == 9 * planned


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(64, 128), (32, 16), (128, 256)])
def test_work_takes_no_more_than_is_set_aside(page_size, head_dim, dtype):
    sizes = {"page_size": page_size, "head_dim": head_dim, "dtype": dtype}
    codec = make_codec("uniform4", target="exact", packs=True, **sizes)
    packed, raw = codec.packed, codec.residual_bytes
    # The share is over the raw bytes of a record. Two streams pack or unpack.
    share = (raw + codec.anchor_bytes + packed.record_bytes + packed.raw_v_bytes) / raw
    buffers = 2 * (packed.record_bytes + codec.anchor_bytes) / raw + 1 / 4
    assert share < 2.6
    assert buffers < 2.7
    assert (2 * share + buffers) * packed_store.AT_ONCE_BYTES < packed_store.work_bytes(raw)


@pytest.mark.parametrize("pages", [[], [2], [5, 1, 2, 4, 3]])
def test_reads_and_writes_on_the_cpu(hosted, pages):
    cache, other = hosted(cache_pages=8), hosted()
    cache.encode(p1=RECORDS, p2=0, p3=SPARE, p4=1, p5=SPARE + 3)
    read = cache.kv.residuals.read_pages(pages)
    assert read.shape == (len(pages), LAYERS, HEADS, cache.kv.codec.residual_bytes)
    assert all(torch.equal(row, cache.content[page]) for row, page in zip(read, pages, strict=True))
    # Raw residuals land, whose anchors are there.
    for write in (write_raw, write_packed):
        write(cache.kv, other.kv, pages)
        other.content = {page + 1: cache.content[page] for page in pages}
        for page in other.content:
            other.fetch(page, by_layer=False)
        other.kv.free_pages(list(other.content))
        assert other.store.num_unfit == 0


def write_raw(kv, other, pages):
    landing = [page + 1 for page in pages]
    other.begin_landing(landing)
    other.records.write_anchors(landing, kv.records.read_anchors(pages))
    other.residuals.write_pages(landing, kv.residuals.read_pages(pages))
    other.finish_encode(landing)


def write_packed(kv, other, pages):
    landing = [page + 1 for page in pages]
    other.begin_landing(landing)
    other.records.write_anchors(landing, kv.records.read_anchors(pages))
    packed = kv.records.read_packed(pages)
    other.records.write_packed(landing, packed.records, packed.raw_v)
    other.finish_encode(landing)


def test_pages_do_not_land_where_anchors_are_freed(hosted):
    cache, other = hosted(), hosted(frees=True)
    cache.encode(p1=1)
    packed = cache.kv.records.read_packed([1])
    for write in (
        lambda: other.store.write([1], cache.kv.residuals.read_pages([1])),
        lambda: other.store.write_packed([1], packed.records, packed.raw_v),
    ):
        with pytest.raises(AssertionError, match="pages land only where the KV cache has all"):
            write()


def test_stored_anchors_are_those_that_drafts_read(hosted):
    cache, pooled = hosted(cache_pages=8, frees=True), hosted(cache_pages=8)
    for each in (cache, pooled):
        each.encode(p1=RECORDS, p2=0, p3=1)
    kept = cache.store._anchors.read([3, 1, 2])
    assert torch.equal(kept, pooled.kv.records.read_anchors([3, 1, 2]))


def test_the_packed_form_is_that_of_a_cache_without_a_store(hosted, make_device_kv):
    cache = hosted(cache_pages=8)
    cache.encode(p1=RECORDS, p2=0, p3=SPARE + 1)
    ours = cache.kv.records.read_packed([3, 1, 2])
    anchors = cache.kv.records.read_anchors([3, 1, 2]).flatten(0, 1)
    raw = torch.stack([cache.content[page] for page in (3, 1, 2)]).flatten(0, 1)
    wanted = cache.kv.codec.packed.pack(anchors, raw)
    assert torch.equal(ours.records.flatten(0, 1), wanted.records)
    assert torch.equal(ours.fits.flatten(0, 1), wanted.fits)
    assert torch.equal(ours.raw_v, wanted.raw_v)


def test_pages_of_foreign_bytes_raise_nothing(hosted):
    cache = hosted()
    packed = cache.kv.codec.packed
    cache.kv.begin_landing([1, 2])
    rubbish = torch.full((2, LAYERS, HEADS, packed.record_bytes), 7, dtype=torch.uint8)
    cache.kv.records.write_packed([1, 2], rubbish, rubbish.new_full((3, packed.raw_v_bytes), 9))
    cache.kv.finish_encode([1, 2])
    read = cache.kv.residuals.read_pages([1, 2])
    assert read.shape[0] == 2
    # V of the first three records, and no other page's.
    assert packed.v_of(read[0]).flatten(0, 1)[:3].unique().tolist() == [9]
    assert packed.v_of(read[1]).unique().tolist() == [0]


@frees
def test_a_freed_page_leaves_nothing_behind(hosted, frees):
    cache = hosted(frees=frees)
    cache.encode(p1=RECORDS, p2=1)
    cache.evict()
    cache.free(1, 2)
    assert cache.store.num_unfit == 0
    cache.encode(p1=0, p2=1)
    cache.evict()
    assert cache.store.num_unfit == 1
    read = cache.kv.residuals.read_pages([1, 2])
    assert torch.equal(read, torch.stack([cache.content[page] for page in (1, 2)]))
    cache.fetch(1, 2, by_layer=True)


@frees
def test_a_page_that_is_freed_before_it_was_settled(hosted, frees):
    cache = hosted(frees=frees)
    cache.encode(p1=RECORDS)
    assert cache.store.doubtful([1]) == [1]
    cache.free(1)
    assert cache.store.doubtful([1]) == []
    cache.encode(p1=SPARE + 1)
    cache.evict()
    cache.fetch(1, by_layer=False)


@by_layer
def test_what_a_row_has_no_room_for_must_be_taken_before_its_slot_goes(
    hosted, monkeypatch, by_layer
):
    monkeypatch.setattr(HostCopies, "settle", lambda copies, pages, slot_of: None)
    caches = [hosted(), hosted()]
    for cache in caches:
        cache.encode(p1=RECORDS)
        cache.evict()
    with pytest.raises(AssertionError, match="page 1 must be settled"):
        caches[0].fetch(1, by_layer=by_layer)
    monkeypatch.setattr(PackedStore, "doubtful", lambda store, pages: [])
    with pytest.raises(AssertionError, match="page=1, layer=0"):
        caches[1].fetch(1, by_layer=by_layer)


@frees
def test_a_warm_up_leaves_nothing_behind(hosted, frees):
    cache = hosted(frees=frees)
    cache.kv.warm_up()
    assert cache.store.num_unfit == 0
    assert cache.store.doubtful(range(9)) == []
    cache.kv.check_integrity()


class ClockedStream(SyncStream):
    """Stream that counts its work, and knows how much of other streams' work is done before its
    own. current_stream: the stream that torch works on."""

    current_stream = None

    def __init__(self):
        self.now = 0
        self.known = Counter()
        # Called before copies that read numbers of rows on the device.
        self.before_rows = lambda: None

    def copy_pages(self, *args):
        super().copy_pages(*args)
        self.now += 1

    def copy_rows(self, *args):
        self.before_rows()
        super().copy_rows(*args)
        self.now += 1

    @contextmanager
    def current(self):
        before, ClockedStream.current_stream = ClockedStream.current_stream, self
        yield
        ClockedStream.current_stream = before

    def mark(self, *, timed=False):
        event = super().mark(timed=timed)
        event.known = self.known | Counter({self: self.now})
        return event

    def wait(self, event):
        self.known |= event.known


@frees
@by_layer
@pytest.mark.parametrize("lost", [None, "stream", "link"])
def test_each_stream_waits_for_what_it_reads_or_overwrites(
    hosted, monkeypatch, by_layer, lost, frees
):
    """lost: a stream that does not wait, as a fault."""
    monkeypatch.setattr("sglang_kvspec.kv.packed_store.AT_ONCE_BYTES", 40_000)
    cache = hosted(frees=frees)
    store, stream = cache.store, ClockedStream()
    link = store._link = ClockedStream()
    unpacker, buffer = store._anchors.unpack, store._next_buffer
    send = packed_store.sent_together
    # Times of `stream`: of its last sends, and of the last unpacking of each buffer.
    sent, unpacked, given = 0, {0: 0, 1: 0}, []

    def send_on_the_stream(*args):
        nonlocal sent
        assert ClockedStream.current_stream is stream, "is sent on another stream"
        stream.now += 1
        sent = stream.now
        return send(*args)

    def unpack_what_is_there(number, *args):
        assert ClockedStream.current_stream is stream, "is unpacked on another stream"
        assert stream.known[link] == link.now, "records are read before they are there"
        assert number == given[-1], "anchors are read from the other buffer"
        stream.now += 1
        unpacked[number] = stream.now
        return unpacker(number)(*args)

    def buffer_that_was_unpacked(shape):
        found, number = buffer(shape), store._buffer
        assert link.known[stream] >= unpacked[number], "is read"
        assert found.data_ptr() == store._buffers[number].data_ptr()
        assert given[-1:] != [number], "is read while it is written again"
        given.append(number)
        return found

    def is_sent():
        assert link.known[stream] >= sent > 0, "what was not sent is read"

    link.before_rows = is_sent
    monkeypatch.setattr(
        store._anchors, "unpack", lambda number: partial(unpack_what_is_there, number)
    )
    monkeypatch.setattr(store, "_next_buffer", buffer_that_was_unpacked)
    monkeypatch.setattr(packed_store, "sent_together", send_on_the_stream)
    cache.encode(p1=0, p2=1)
    cache.encode(p3=0, p4=0)
    cache.encode(p5=SPARE + 1)
    cache.evict()
    # Whatever was enqueued before is done before the first copy.
    stream.now += 1
    if lost is not None:
        monkeypatch.setattr(stream if lost == "stream" else link, "wait", lambda event: None)
    pages, slots = [1, 2, 3, 4], [0, 1, 2, 3]

    def get():
        if by_layer:
            for _ in store.get_by_layer(stream, slots, pages):
                pass
        else:
            store.get(stream, slots, pages)

    if lost is None:
        get()
        assert len(given) > 3
        get()
    else:
        with pytest.raises(AssertionError, match=r"is read|are read"):
            get()


def test_the_link_waits_for_no_unpacking_of_the_fetch_before(hosted):
    cache = hosted()
    stream = ClockedStream()
    link = cache.store._link = ClockedStream()
    cache.encode(p1=0, p2=SPARE)
    cache.evict()
    for page in (1, 2):
        cache.store.get(stream, [page], [page])
        assert link.now == page
        assert link.known[stream] == 0


def test_v_of_few_pages_is_on_its_way_at_once(hosted, monkeypatch):
    """Each page has more V than is kept for it."""
    monkeypatch.setattr("sglang_kvspec.kv.packed_store.AT_ONCE_BYTES", 100_000)
    cache = hosted()
    begin, begun = cache.store._begin, []

    def begin_and_note(stream, slots, pages):
        begun.append(list(pages))
        return begin(stream, slots, pages)

    monkeypatch.setattr(cache.store, "_begin", begin_and_note)
    cache.encode(p1=RECORDS, p2=RECORDS)
    cache.encode(p3=RECORDS)
    cache.evict()
    cache.fetch(1, 2, 3, by_layer=False)
    assert begun == [[1, 2], [3]]


@frees
@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_random_pages(hosted, monkeypatch, at_once, frees):
    monkeypatch.setattr("sglang_kvspec.kv.packed_store.AT_ONCE_BYTES", at_once)
    cache = hosted(cache_pages=5, num_pages=12, frees=frees)
    rng = random.Random(at_once)
    free = list(range(1, 13))
    for _ in range(40):
        pages = sorted(cache.content)
        action = rng.choice(["encode", "encode", "free", "evict", "fetch", "read"])
        some = rng.sample(pages, min(len(pages), rng.randint(1, 4)))
        if action == "encode" and len(free) >= 2:
            chosen = [free.pop(rng.randrange(len(free))) for _ in range(rng.randint(1, 2))]
            counts = [0, 1, SPARE, SPARE + 1, RECORDS]
            cache.encode(**{f"p{page}": rng.choice(counts) for page in chosen})
        elif action == "free" and some:
            cache.free(*some)
            free += some
        elif action == "evict":
            cache.evict()
        elif action == "fetch" and some:
            cache.evict()
            cache.fetch(*some, by_layer=rng.random() < 0.5)
        elif action == "read" and some:
            read = cache.kv.residuals.read_pages(some)
            assert torch.equal(read, torch.stack([cache.content[page] for page in some]))
        cache.kv.check_integrity()


def test_a_forward_beyond_the_cache_is_refused(hosted):
    cache = hosted(cache_pages=2)
    for page in ("p1", "p2", "p3"):
        cache.encode(**{page: 0})
    with pytest.raises(CapacityError, match="one forward needs more residuals"):
        cache.fetch(1, 2, 3, by_layer=True)
