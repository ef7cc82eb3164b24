"""The packed exact residual: every bit comes back, and what does not fit is said."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels import packed_format
from kvspec_kernels.codecs.fields import FormatError
from kvspec_kernels.packed_format import PackedLayout, code_width
from kvspec_kernels.reference import packed_exact
from sglang_kvspec.codecs import make_codec

SIZES = [(64, 128), (64, 64), (32, 80), (64, 96)]
DTYPES = [torch.bfloat16, torch.float16]


class Packed:
    """Anchors of some pages, and the packed residuals of any pages beside these anchors."""

    def __init__(self, k, v):
        _, page_size, _, head_dim = k.shape
        sizes = {"page_size": page_size, "head_dim": head_dim, "dtype": k.dtype}
        codec = make_codec("uniform4", target="exact", **sizes)
        self.layout = PackedLayout(**sizes)
        anchors = codec.encode(k, v).anchor
        self.known = (codec.decode_anchor(anchors), anchors, codec.anchor_layout, self.layout)

    def encode(self, k, v):
        packed = packed_exact.encode(k, v, *self.known)
        assert torch.equal(packed.fits, packed.words <= self.layout.body_words)
        self.raw_v = packed.raw_v
        return packed.records, packed.fits

    def decode(self, records):
        return packed_exact.decode(records, self.raw_v, *self.known)


def pages_like_kv(num_pages, page_size, num_heads, head_dim, dtype, seed=0):
    """Return pages whose channels differ in size and centre, as those of K do."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(num_heads, head_dim, generator=generator) * 1.5
    centre = torch.randn(num_heads, head_dim, generator=generator)
    noise = torch.randn(num_pages, page_size, num_heads, head_dim, generator=generator)
    return (centre + noise * size.exp() / 4).to(dtype)


def bits_of(pages):
    return pages.view(torch.int16)


def assert_equal(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(bits_of(ours), bits_of(theirs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_bit_comes_back(size, dtype):
    page_size, head_dim = size
    k, v = (pages_like_kv(6, page_size, 2, head_dim, dtype, seed) for seed in (1, 2))
    packed = Packed(k, v)
    records, fits = packed.encode(k, v)
    assert records.shape == (6, 2, packed.layout.nbytes)
    assert fits.all()
    assert_equal(packed.decode(records), (k, v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bit_pattern_comes_back(dtype):
    """Infinities, NaN with payloads, both zeros and subnormals, in any cell: a few of a page's
    values are replaced after its anchors were made."""
    k, v = (pages_like_kv(16, 64, 2, 128, dtype, seed) for seed in (3, 4))
    packed = Packed(k, v)
    generator = torch.Generator().manual_seed(5)
    for pages in (k, v):
        any_bits = torch.randint(-32768, 32768, pages.shape, generator=generator)
        chosen = torch.rand(pages.shape, generator=generator) < 0.015
        bits_of(pages).copy_(torch.where(chosen, any_bits.to(torch.int16), bits_of(pages)))
    records, fits = packed.encode(k, v)
    assert fits.all()
    assert_equal(packed.decode(records), (k, v))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-7, 6e4])
def test_pages_of_one_value(value):
    """Their scale is zero."""
    k = torch.full((2, 64, 1, 64), value, dtype=torch.float16)
    packed = Packed(k, k)
    records, fits = packed.encode(k, k)
    assert fits.all()
    assert_equal(packed.decode(records), (k, k))


def test_a_page_that_needs_more_says_so_and_its_neighbours_fit():
    k, v = (pages_like_kv(4, 64, 2, 64, torch.bfloat16, seed) for seed in (6, 7))
    packed = Packed(k, v)
    bits_of(k)[1, :, 1] = torch.randint(-32768, 32767, (64, 64)).to(torch.int16)
    records, fits = packed.encode(k, v)
    assert fits.flatten().tolist() == [True, True, True, False, True, True, True, True]
    assert packed.raw_v.shape == (1, packed.layout.raw_nbytes)
    assert not records[1, 1, :16].any()
    assert_equal(packed.decode(records), (k, v))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_bits_come_back_where_no_record_fits(size):
    page_size, head_dim = size
    k, v = (pages_like_kv(3, page_size, 2, head_dim, torch.float16, seed) for seed in (13, 14))
    packed = Packed(k, v)
    generator = torch.Generator().manual_seed(15)
    for pages in (k, v):
        any_bits = torch.randint(-32768, 32768, pages.shape, generator=generator)
        bits_of(pages).copy_(any_bits.to(torch.int16))
    records, fits = packed.encode(k, v)
    assert not fits.any()
    assert len(packed.raw_v) == 6
    assert_equal(packed.decode(records), (k, v))
    # A peer may send fewer rows than records need.
    again = packed_exact.decode(records, packed.raw_v[:4], *packed.known)
    assert torch.equal(bits_of(again[0]), bits_of(k))
    assert torch.equal(bits_of(again[1][:2]), bits_of(v[:2]))


@pytest.mark.parametrize("page_size", range(32, 257, 32))
def test_raw_k_fits_into_a_record(page_size):
    for head_dim in range(16, 257, 16):
        for dtype in DTYPES:
            layout = PackedLayout(page_size, head_dim, dtype)
            assert layout.nbytes >= packed_format.RAW_OFFSET + layout.raw_nbytes


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_anchors_of_pages_that_are_not_finite(bad):
    """Such anchors are garbage, and must not decide by bits that devices compute differently."""
    k, v = (pages_like_kv(3, 64, 1, 64, torch.bfloat16, seed) for seed in (8, 9))
    k[1, 5, 0, 7] = bad
    v[2, 9, 0, 1] = bad
    packed = Packed(k, v)
    # NaN near the NaN that this CPU computes as an anchor's value.
    bits_of(k)[1, :4, 0, 7] = torch.tensor([-1, -2, -3, -4], dtype=torch.int16)
    records, fits = packed.encode(k, v)
    assert fits[0].all()
    assert_equal(packed.decode(records), (k, v))
    values, *others = packed.known
    assert any(part.isnan().any() for part in values) or not torch.tensor(bad).isnan()
    signed = tuple(torch.where(part.isnan(), -part, part) for part in values)
    again = packed_exact.decode(records, packed.raw_v, signed, *others)
    assert_equal(again, (k, v))


def test_a_damaged_record_is_read_within_its_body():
    k, v = (pages_like_kv(2, 64, 1, 64, torch.bfloat16, seed) for seed in (10, 11))
    packed = Packed(k, v)
    records, _ = packed.encode(k, v)
    packed.decode(torch.full_like(records, 255))
    records[0, 0, packed.layout.body_offset + 40] ^= 4
    assert not torch.equal(bits_of(packed.decode(records)[0]), bits_of(k))


def test_widths_follow_the_rule_of_the_format():
    """Steps beyond the ends of the reference's table have the widths of its ends."""
    k = pages_like_kv(2, 64, 1, 64, torch.bfloat16, 12)
    packed = Packed(k, k)
    values, anchors, anchor_layout, layout = packed.known
    rule = packed_exact._Rule.of("k", values[0], anchors, anchor_layout, layout)
    scale = packed_exact._scales("k", anchors, anchor_layout, k.shape).view(torch.int32)
    steps = (values[0].float().abs().view(torch.int32) >> 22) - (scale >> 22)
    wanted = steps.clone().apply_(lambda n: code_width(n, 7))
    assert torch.equal(packed_exact._segments(wanted, "k", layout).long(), rule.width)
    assert rule.width.min() >= 3
    assert rule.width.max() == 11


def test_sizes():
    layout = PackedLayout(64, 128, torch.bfloat16)
    assert layout.num_segments == 8
    assert layout.nbytes % 16 == 0
    assert 8.125 <= layout.bits_per_element < 8.2
    assert layout.body_words < 2**16, "starts have 16 bits"
    assert PackedLayout(64, 128, torch.float16).bits_per_element < 11.2
    with pytest.raises(FormatError, match="bf16 or fp16"):
        PackedLayout(64, 128, torch.float32)
    assert packed_format.VERSION == 1
