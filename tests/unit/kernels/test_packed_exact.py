"""Kernels of the packed exact residual against the reference: every byte, packed and unpacked."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import (
    FormatError,
    Log4Settings,
    Uniform4Settings,
    anchor_layout,
    residual_layout,
)
from kvspec_kernels.ops import packed_exact as ops
from kvspec_kernels.ops.packed_exact import Unpacker, pack, unpack
from kvspec_kernels.packed_format import PackedLayout
from kvspec_kernels.reference import exact, packed_exact, uniform4
from kvspec_testkit.kernels.encoding import make_pages
from kvspec_testkit.kernels.interpreter import hasten_interpreter
from sglang_kvspec.codecs import make_codec

HEADS = 2
BF16, FP16 = torch.bfloat16, torch.float16
# One or two segments a part, five, as many as a program has, and more; tiles in groups of 4 and 2.
SIZES = [
    (32, 16, BF16),
    (32, 80, FP16),
    (64, 128, BF16),
    (64, 64, FP16),
    (96, 48, BF16),
]
by_size = pytest.mark.parametrize("size", SIZES, ids=str)


@pytest.fixture(autouse=True)
def quick(interpreted, monkeypatch):
    hasten_interpreter(monkeypatch)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what torch.empty returns with 0xFF."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Packed:
    """Pages, their records by the reference, and what the kernels make of the same bytes. All
    records are [number, bytes]."""

    def __init__(self, anchors, k, v, settings, device):
        page_size, head_dim, self.dtype = k.shape[1], k.shape[3], k.dtype
        self.device = device
        self.anchor_layout = anchor_layout(settings, page_size, head_dim)
        self.layout = PackedLayout(page_size, head_dim, k.dtype)
        raw_layout = residual_layout(settings, "exact", page_size, head_dim, k.dtype)
        values = uniform4.decode_anchor(anchors, settings, self.anchor_layout, k.dtype)
        self.known = (values, anchors, self.anchor_layout, self.layout)
        wanted = packed_exact.encode(k, v, *self.known)
        self.by_head = wanted.records
        self.records, self.fits = wanted.records.flatten(0, 1), wanted.fits.flatten()
        self.raw_v = wanted.raw_v
        self.raw = exact.encode(k, v, raw_layout).flatten(0, 1)
        self.anchors = anchors.flatten(0, 1)

    @classmethod
    def of(cls, anchored, pages, settings, device):
        layout = anchor_layout(settings, pages[0].shape[1], pages[0].shape[3])
        return cls(uniform4.encode(*anchored, settings, layout)[0], *pages, settings, device)

    def pack(self):
        given = (self._strided(self.anchors), self._strided(self.raw))
        records, fits = pack(*given, self.anchor_layout, self.layout)
        return records.cpu(), fits.cpu()

    def unpack(self, records, raw_v):
        given = (self._strided(self.anchors), self._strided(records), raw_v.to(self.device))
        return unpack(*given, self.anchor_layout, self.layout).cpu()

    def assert_both_ways(self):
        records, fits = self.pack()
        assert torch.equal(fits, self.fits)
        for number, (ours, theirs) in enumerate(zip(records, self.records, strict=True)):
            assert torch.equal(ours, theirs), number
        assert torch.equal(self.unpack(self.records, self.raw_v), self.raw)

    def _strided(self, rows):
        """Return rows of a pool that has more bytes a row."""
        pool = torch.full((len(rows), rows.shape[1] + 48), 0xA5, dtype=torch.uint8)
        pool[:, : rows.shape[1]] = rows
        return pool.to(self.device)[:, : rows.shape[1]]


def random_bits(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-32768, 32768, shape, generator=generator).to(torch.int16)


def some_replaced(pages, share, seed):
    """Return pages in which a share of the values has any bits."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(pages.shape, generator=generator) < share
    bits = pages.view(torch.int16)
    return torch.where(chosen, random_bits(pages.shape, seed), bits).view(pages.dtype)


@cache
def mixed_pages(page_size, head_dim, dtype, device):
    """Return pages of every kind. Anchors are those of pages like KV, except in pages 4 and 5."""
    anchored = make_pages(7, page_size, HEADS, head_dim, dtype)
    pages = tuple(part.clone() for part in anchored)
    for seed, part in enumerate(pages):
        part[1] = some_replaced(part[1], 0.015, seed)
        # One head does not fit, and its neighbours do.
        part[2, :, 1] = some_replaced(part[2, :, 1], 1.0, seed + 2)
        # Half of a page's segments are long.
        part[3, : page_size // 2] = some_replaced(part[3, : page_size // 2], 0.2, seed + 4)
    for part, there in zip(anchored, pages, strict=True):
        part[4] = there[4] = -2.5
        part[5, 3, :, 5] = there[5, 3, :, 5] = float("nan")
        part[5, 9, :, 7] = there[5, 9, :, 7] = -float("inf")
        # Far beyond any anchor value, and the end of the range.
        there[6, ::5] = torch.finfo(dtype).max
        there[6, 1::5] = 0.0
    settings = Uniform4Settings.for_page(page_size)
    return Packed.of(anchored, pages, settings, device)


@by_size
def test_packed_records_are_those_of_the_reference(size, device):
    packed = mixed_pages(*size, device)
    assert packed.fits[:5].all()
    assert not packed.fits[5]
    records, fits = packed.pack()
    assert torch.equal(fits, packed.fits)
    for number, (ours, theirs) in enumerate(zip(records, packed.records, strict=True)):
        assert torch.equal(ours, theirs), number


@by_size
def test_every_byte_comes_back(size, device):
    packed = mixed_pages(*size, device)
    raw = packed.unpack(packed.records, packed.raw_v)
    for number, (ours, theirs) in enumerate(zip(raw, packed.raw, strict=True)):
        assert torch.equal(ours, theirs), number


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_any_anchors(dtype, device):
    """Metadata of any bits, with infinities, NaN, negative scales and sums beyond the range, and
    values near what the anchors say."""
    settings = Uniform4Settings(k_group=32)
    layout = anchor_layout(settings, 64, 32)
    anchors = random_bits((24, 1, layout.nbytes // 2), 7).view(torch.uint8)
    # Exponents of half of the records are those of numbers that pages have.
    for name in ("k_scale", "k_zero", "v_scale", "v_zero"):
        field = layout[name].view(anchors)
        field[:12] = torch.randn(field[:12].shape, generator=torch.Generator().manual_seed(8))
    # NaN beside a scale whose sign bit is set.
    layout["v_scale"].view(anchors)[:2, :, ::2] = -0.0
    layout["v_zero"].view(anchors)[:2, :, ::4] = float("nan")
    pages = []
    for part in uniform4.decode_anchor(anchors, settings, layout, dtype):
        near = random_bits(part.shape, 9) >> 12
        pages.append((part.view(torch.int16) + near).view(dtype))
    packed = Packed(anchors, *pages, settings, device)
    assert packed.fits.any()
    packed.assert_both_ways()


def test_where_no_record_fits(device):
    """V comes from rows, in order, and is zero where rows are missing."""
    anchored = make_pages(3, 32, HEADS, 80, FP16)
    pages = tuple(some_replaced(part, 1.0, 11) for part in anchored)
    packed = Packed.of(anchored, pages, Uniform4Settings(k_group=32), device)
    assert not packed.fits.any()
    records, fits = packed.pack()
    assert torch.equal(records, packed.records)
    assert not fits.any()
    half = packed.layout.raw_nbytes
    for num_rows in (0, 4):
        raw = packed.unpack(packed.records, packed.raw_v[:num_rows])
        assert torch.equal(raw[:, :half], packed.raw[:, :half])
        assert torch.equal(raw[:num_rows], packed.raw[:num_rows])
        assert not raw[num_rows:, half:].any()
    # The kernel reads no row in front of raw_v.
    rows = packed.raw_v.new_full((3, half), 7).to(device)[1:]
    none = torch.zeros(len(packed.records), dtype=torch.int32, device=device)
    given = (packed.anchors.to(device), packed.records.to(device), rows)
    raw = unpack(*given, packed.anchor_layout, packed.layout, none).cpu()
    assert torch.equal(raw[:, :half], packed.raw[:, :half])
    assert not raw[:, half:].any()


def test_damaged_records_are_read_within_their_bodies(device):
    """Behind its body a record reads as zero, as in the reference."""
    packed = mixed_pages(64, 64, FP16, device)
    shape, body = packed.by_head.shape, packed.layout.body_offset
    anything = random_bits((*shape[:2], shape[2] // 2), 12).view(torch.uint8)
    damaged = packed.by_head.clone()
    damaged[0, 0], damaged[0, 1] = 255, anything[0, 0]
    damaged[1, 0, 4:body], damaged[1, 1, body:] = 255, anything[1, 1, body:]
    damaged[2, 0, 4:body] = anything[2, 0, 4:body]
    # Segments that begin near the end of the body, and leave their escapes behind the end.
    starts = packed.layout.body_words - 1 - 37 * torch.arange(2 * packed.layout.num_segments)
    damaged[4:6, :, 4:body] = starts.to(torch.int16).view(torch.uint8)
    damaged[:, :, 0], damaged[:, :, 1] = 1, 0
    # Codes of all ones: every value escapes.
    damaged[3:, :, body:] = 255
    wanted = packed_exact.decode(damaged, packed.raw_v[:0], *packed.known)
    raw = packed.unpack(damaged.flatten(0, 1), packed.raw_v[:0])
    sizes = (packed.layout.page_size, packed.layout.head_dim)
    ours = raw.view(torch.int16).view(*shape[:2], 2, *sizes)
    for number, theirs in enumerate(wanted):
        assert torch.equal(ours[:, :, number], theirs.view(torch.int16).transpose(1, 2))


def test_records_of_several_programs_and_rounds(device, monkeypatch):
    """A GPU's programs have fewer segments than those of the interpreter."""
    monkeypatch.setattr(ops, "WARPS", 4)
    packed = mixed_pages(32, 80, FP16, device)
    two = slice(4, 6)
    assert packed.fits[two].tolist() == [True, False]
    packed = copy.copy(packed)
    for name in ("anchors", "raw", "records", "fits"):
        setattr(packed, name, getattr(packed, name)[two])
    packed.assert_both_ways()


@pytest.mark.parametrize("layer", [None, 0, 1], ids=["both layers", "first", "second"])
@pytest.mark.parametrize("size", [(64, 128, BF16), (32, 80, FP16)], ids=str)
def test_records_go_from_rows_of_a_pool_to_rows_of_another(size, layer, device):
    """Pages of two layers and two heads. Ranks are those of V in reverse."""
    packed = mixed_pages(*size, device)
    layers = 2
    by_page = [
        rows[HEADS:].view(3, layers, HEADS, -1)
        for rows in (packed.anchors, packed.records, packed.raw)
    ]
    unfit = ~packed.fits[HEADS:].view(3, layers, HEADS)
    assert unfit.sum() > 1
    raw_v = packed.raw_v[: int(unfit.sum())].flip(0)
    # Their place in memory, and their steps, are as in a part of a larger tensor.
    many = torch.zeros(5, 4, HEADS, dtype=torch.int32)
    ranks = many[1:4, 1:3]
    ranks[unfit] = torch.arange(len(raw_v), 0, -1, dtype=torch.int32)
    anchor_rows, raw_rows = torch.tensor([4, 0, 2]), torch.tensor([1, 6, 3])
    # A pool by layer, and one by page.
    anchors = torch.full((layers, 5, *by_page[0].shape[2:]), 0xA5, dtype=torch.uint8).transpose(
        0, 1
    )
    anchors[anchor_rows] = by_page[0]
    raw = torch.full((8, *by_page[2].shape[1:]), 0xA5, dtype=torch.uint8)
    wanted = raw.clone()
    some = slice(None) if layer is None else slice(layer, layer + 1)
    wanted[raw_rows, some] = by_page[2][:, some]
    found = raw.to(device)
    unpacker = Unpacker(found, anchors.to(device), packed.anchor_layout, packed.layout)
    unpacker(
        raw_rows.to(device),
        anchor_rows.to(device),
        by_page[1][:, some].contiguous().to(device),
        raw_v.to(device),
        many.to(device)[1:4, 1:3],
        layer or 0,
    )
    assert torch.equal(found.cpu(), wanted)


def test_a_codec_packs_alike_by_kernel_and_in_plain_torch(device):
    """Plain torch packs a few pages at a time."""
    sizes = {"page_size": 32, "head_dim": 16, "dtype": BF16}
    packed = make_codec("uniform4", target="exact", packs=True, **sizes)
    generator = torch.Generator().manual_seed(9)
    k, v = torch.randn(2, 3, 32, 2, 16, generator=generator).to(BF16)
    v[1, :, 0] = (2.0 ** (30 * torch.rand(32, 16, generator=generator) - 16)).to(BF16)
    anchor, residual = packed.encode(k, v)
    wanted = packed.packed.pack(anchor, residual)
    assert wanted.fits.tolist() == [[True, True], [False, True], [True, True]]
    form, there = packed.packed, (anchor.to(device), residual.to(device))
    records, fits = form._pack_by_kernel(*there)
    assert torch.equal(records.cpu(), wanted.records)
    assert torch.equal(fits.cpu(), wanted.fits)
    # Rows of raw V may lie anywhere.
    ranks = torch.where(fits, 0, 2)
    rows = torch.cat([torch.zeros_like(wanted.raw_v), wanted.raw_v]).to(device)
    assert torch.equal(form._unpack_by_kernel(there[0], records, rows, ranks), there[1])
    assert torch.equal(
        form.unpack_records(anchor, wanted.records, rows.cpu(), ranks.cpu()), residual
    )
    # Pools of two layers, and pages in another order.
    order = torch.tensor([2, 0, 1], device=device)
    anchors, raws = (each[:, None].expand(-1, 2, -1, -1).contiguous() for each in there)
    given = (order, order, records[order][:, None], rows, ranks[order][:, None].expand(-1, 2, -1))
    for make in (form.unpacker, form._unpacker_by_kernel):
        raw = torch.zeros_like(raws)
        unpack_pages = make(raw, anchors)
        for layer in range(2):
            assert not raw[:, layer].any()
            unpack_pages(*given, layer)
        assert torch.equal(raw, raws)


def test_no_records(device):
    packed = mixed_pages(32, 16, BF16, device)
    layouts = (packed.anchor_layout, packed.layout)
    none = [torch.empty(0, nbytes, dtype=torch.uint8, device=device) for nbytes in (
        packed.anchor_layout.nbytes, 2 * packed.layout.raw_nbytes, packed.layout.raw_nbytes,
    )]  # fmt: skip
    records, fits = pack(none[0], none[1], *layouts)
    assert records.shape == (0, packed.layout.nbytes)
    assert fits.shape == (0,)
    assert unpack(none[0], records, none[2], *layouts).shape == none[1].shape


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Log4Settings.for_page(64), "uniform4"),
        (Uniform4Settings(anchor_bits=2), "4 bits"),
        (Uniform4Settings(k_group=8), "multiples of 16"),
    ],
)
def test_other_anchors_are_refused(settings: CodecSpec, message: str, device):
    other, layout = anchor_layout(settings, 64, 64), PackedLayout(64, 64, BF16)
    rows = [torch.zeros(1, n, dtype=torch.uint8) for n in (other.nbytes, 2 * layout.raw_nbytes)]
    with pytest.raises(FormatError, match=message):
        pack(*rows, other, layout)


def test_tensors_that_do_not_fit_are_refused(device):
    packed = mixed_pages(32, 16, BF16, device)
    layouts = (packed.anchor_layout, packed.layout)
    anchors, raw, records = packed.anchors, packed.raw, packed.records
    with pytest.raises(ValueError, match="raw must be uint8"):
        pack(anchors, raw[:, 16:], *layouts)
    with pytest.raises(ValueError, match="raw must have 14 rows"):
        pack(anchors, raw[1:], *layouts)
    with pytest.raises(ValueError, match="multiples of 16"):
        pack(anchors, torch.zeros(14, raw.shape[1] + 8, dtype=torch.uint8)[:, 8:], *layouts)
    with pytest.raises(ValueError, match="anchors must be uint8"):
        unpack(anchors.view(torch.int8), records, packed.raw_v, *layouts)
    with pytest.raises(ValueError, match="raw_v must be uint8"):
        unpack(anchors, records, packed.raw_v[:, 2:], *layouts)
    with pytest.raises(ValueError, match="ranks must have 14 rows"):
        unpack(anchors, records, packed.raw_v, *layouts, torch.zeros(13, dtype=torch.int64))
    pools = [each.view(7, 1, HEADS, -1) for each in (raw, anchors, records)]
    with pytest.raises(ValueError, match=r"raw must be uint8 \[records, 1, 2, "):
        Unpacker(pools[0].view(14, 1, 1, -1), pools[1], *layouts)
    rows, ranks = torch.arange(7), torch.zeros(7, 1, HEADS, dtype=torch.int32)
    unpacker = Unpacker(*pools[:2], *layouts)
    with pytest.raises(ValueError, match="anchor_rows must have 7 rows"):
        unpacker(rows, rows[1:], pools[2], packed.raw_v, ranks)
    with pytest.raises(AssertionError, match="must have these layers"):
        unpacker(rows, rows, pools[2], packed.raw_v, ranks, 1)


@pytest.mark.gpu
def test_neither_waits_for_the_device(device):
    packed = mixed_pages(64, 128, BF16, device)
    anchors, raw, records, raw_v = (
        rows.to(device) for rows in (packed.anchors, packed.raw, packed.records, packed.raw_v)
    )
    layouts = (packed.anchor_layout, packed.layout)
    rows = torch.arange(len(raw), device=device)
    pools = [each[:, None, None] for each in (torch.empty_like(raw), anchors, records)]
    unpacker = Unpacker(*pools[:2], *layouts)
    given = (rows, rows, pools[2], raw_v, rows[:, None, None])
    pack(anchors, raw, *layouts)
    unpack(anchors, records, raw_v, *layouts)
    unpacker(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pack(anchors, raw, *layouts)
        unpack(anchors, records, raw_v, *layouts)
        unpacker(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
