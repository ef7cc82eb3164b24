"""Anchors of 2 bits against the 4-bit records of the same pages, element by element."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvspec_kernels.formats import Log4Settings, Uniform4Settings, anchor_layout, residual_layout
from kvspec_kernels.reference import fragments, log4, nibbles, uniform4

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SETTINGS = {
    "log4": Log4Settings.for_page(32),
    "log4-top105": Log4Settings(k_chunk=16, v_chunk=32, top=105),
    "log4-mean": Log4Settings(v_chunk=32, centre="mean", top=120),
    "uniform4": Uniform4Settings.for_page(32),
}
# Pages with an odd and with an even number of tile pairs: groups of 2 and of 4.
SIZES = [(32, 32), (32, 96), (96, 64)]

by_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
by_size = pytest.mark.parametrize(("page_size", "head_dim"), SIZES)


class Records:
    """Pages as records with one number of anchor bits."""

    def __init__(self, pages, settings, bits):
        self.settings = dataclasses.replace(settings, anchor_bits=bits)
        _, self.page_size, _, self.head_dim = pages[0].shape
        sizes, dtype = (self.page_size, self.head_dim), pages[0].dtype
        self.anchor = anchor_layout(self.settings, *sizes)
        self.residual = residual_layout(self.settings, "int8", *sizes, dtype)
        self.codec = log4 if isinstance(settings, Log4Settings) else uniform4
        layouts = (self.anchor, self.residual)
        self.anchors, self.residuals = self.codec.encode(*pages, self.settings, *layouts)

    def anchor_values(self, dtype=torch.float32):
        return self.codec.decode_anchor(self.anchors, self.settings, self.anchor, dtype)

    def refined_values(self, dtype):
        layouts = (self.anchor, self.residual)
        records = (self.anchors, self.residuals)
        return self.codec.decode_refined(*records, self.settings, *layouts, dtype)

    def by_token(self, words, part):
        """Return codes in stored order as int64 [N, H, P, D]."""
        return fragments.codes_from_words(words, part, self.page_size).long()

    def pairs(self, part, field):
        layout, records = (
            (self.anchor, self.anchors) if field == "codes" else (self.residual, self.residuals)
        )
        packed = layout[f"{part}_{field}"].view(records).unflatten(-1, (-1, 4))
        return self.by_token(fragments.unpack_pairs(packed), part)

    def ordered_codes(self, part):
        """Return u of a 4-bit anchor, as formats.py numbers it."""
        packed = self.anchor[f"{part}_codes"].view(self.anchors).unflatten(-1, (-1, 4))
        if self.codec is uniform4:
            return self.by_token(fragments.by_halves(nibbles.unpack(packed)), part)
        codes = self.by_token(fragments.unpack_sign_magnitude(packed), part)
        magnitude = codes & 7
        return torch.where(codes >= 8, 7 - magnitude, 8 + magnitude)


@pytest.fixture
def pages(cache_like_pages, page_size, head_dim):
    return cache_like_pages(num=2, page_size=page_size, head_dim=head_dim)


@by_settings
@by_size
def test_codes_are_the_two_halves_of_the_4_bit_code(pages, settings):
    four, two = (Records(pages, settings, bits) for bits in (4, 2))
    for part in "kv":
        wanted = four.ordered_codes(part)
        assert len(wanted.unique()) == 16
        assert torch.equal(two.pairs(part, "codes"), wanted >> 2)
        assert torch.equal(two.pairs(part, "rest"), wanted & 3)
    for layouts, records in (
        ((four.residual, two.residual), (four.residuals, two.residuals)),
        ((four.anchor, two.anchor), (four.anchors, two.anchors)),
    ):
        for field in layouts[0].fields:
            if layouts[0] is four.residual or not field.name.endswith("codes"):
                bytes_of_both = (
                    layout[field.name].view(stored).contiguous().view(torch.uint8)
                    for layout, stored in zip(layouts, records, strict=True)
                )
                assert torch.equal(*bytes_of_both), field.name


@by_settings
@by_size
def test_anchors_decode_to_the_formula(pages, settings):
    records = Records(pages, settings, 2)
    for part, got in zip("kv", records.anchor_values(), strict=True):
        code = records.pairs(part, "codes")
        fields = [field for field in records.anchor.fields if field.name.startswith(f"{part}_")]
        stored = {field.name[2:]: field.view(records.anchors) for field in fields}
        stored = {name: fragments.LOAD[part](stored[name]) for name in stored if name != "codes"}
        if records.codec is log4:
            base = records.anchor["scale_base"].view(records.anchors)[..., "kv".index(part)].int()
            bits = stored["scale"].int() + base[..., None, None] << 19
            scale, zero = bits.view(torch.float32), stored["centre"].float()
            level = (2 * code - 3) * 28 / torch.tensor(settings.top, dtype=torch.float64)
        else:
            scale, zero = stored["scale"].float(), stored["zero"].float()
            level = 4 * code + 1.5
        if records.codec is log4 or part == "k":
            # Metadata of every token: [N, H, P, D].
            repeats = records.page_size // scale.shape[2]
            scale, zero = (x.repeat_interleave(repeats, dim=2) for x in (scale, zero))
        else:
            scale, zero = scale[..., None], zero[..., None]
        want = level.float() * scale + zero
        assert torch.equal(got, want.transpose(1, 2))


@by_settings
@by_size
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_refined_values_are_those_of_4_bit_records(pages, settings, dtype):
    pages = [page.to(dtype) for page in pages]
    four, two = (Records(pages, settings, bits) for bits in (4, 2))
    for got, want in zip(two.refined_values(dtype), four.refined_values(dtype), strict=True):
        assert torch.equal(got, want)


def test_all_codes_are_put_together_again():
    codes = torch.arange(16, dtype=torch.uint8)
    ordered = log4.in_order(codes)
    assert ordered.tolist() == [*range(8, 16), *range(7, -1, -1)]
    assert torch.equal(log4.from_order(ordered), codes)


@by_settings
def test_no_pages(settings):
    none = torch.zeros(0, 32, 2, 32)
    records = Records((none, none), settings, 2)
    for got in records.anchor_values() + records.refined_values(torch.float32):
        assert got.shape == none.shape


@by_settings
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_the_range_stay_finite(cache_like_pages, settings, dtype):
    k, v = cache_like_pages(num=1, page_size=32, head_dim=32)
    size = torch.finfo(dtype).max / 2
    pages = [(page.double() / page.abs().max() * size).to(dtype) for page in (k, v)]
    records = Records(pages, settings, 2)
    for got, want in zip(records.anchor_values(dtype), pages, strict=True):
        assert got.isfinite().all()
        # Levels end at 0.7 to 0.8 of a scale, which is at most twice the size.
        assert (got.double() - want.double()).abs().max() <= 0.6 * size
