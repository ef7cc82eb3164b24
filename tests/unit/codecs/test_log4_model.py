"""log4 against a scalar model of Lynx's Algorithm 1 that uses only the math module."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import pytest
import torch

from kvspec_kernels.formats import Log4Settings, anchor_layout, residual_layout
from kvspec_kernels.reference import companding, fragments, log4, nibbles

PAGE, DIM = 64, 16
SETTINGS = [
    Log4Settings(),
    Log4Settings(centre="mean", alpha=8.0, top=118, levels="corner"),
    Log4Settings(k_chunk=64, v_chunk=32, alpha=2.0, top=112, levels="interval", last_level=0.5),
]


def fp32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def fp32_bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def from_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bf16(x: float) -> float:
    bits = fp32_bits(x)
    return from_bits((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000)


def model_encode(page, chunk, settings):
    """Encode a page, a nested list [P][D] of fp32 values. Return dicts of anchor code and
    correction by (token, channel), and of centre and 12-bit scale by (row, channel)."""
    centres, scales = {}, {}
    for row in range(len(page) // chunk):
        for d in range(len(page[0])):
            xs = [page[t][d] for t in range(row * chunk, (row + 1) * chunk)]
            mean = sum(xs) / len(xs)
            middle = fp32(min(xs) / 2 + max(xs) / 2)
            centre = bf16(middle if settings.centre == "midrange" else mean)
            reach = max(fp32(max(xs) - centre), fp32(centre - min(xs)))
            centres[row, d] = centre
            scales[row, d] = -(-fp32_bits(reach) // 2**19)
    floor = max(0, max(scales.values()) - 255)
    scales = {key: max(value, floor) for key, value in scales.items()}
    codes, corrections = {}, {}
    for t, row_values in enumerate(page):
        for d, x in enumerate(row_values):
            centred = fp32(x - centres[t // chunk, d])
            normal = fp32(abs(centred) / from_bits(scales[t // chunk, d] << 19))
            a = settings.alpha
            companded = settings.top * (math.log(1 + a * normal) / math.log(1 + a) if a else normal)
            integer = math.floor(companded + 0.5)
            magnitude = (integer + 7) >> 4
            codes[t, d] = magnitude + 8 * (centred < 0)
            corrections[t, d] = (magnitude << 4) - integer
    return codes, corrections, centres, scales


def by_token(words, part):
    """Return codes [N, H, words, 8] in stored order as [N, H, P, D]."""
    if part == "k":
        return fragments.from_words(words, PAGE, DIM)
    return fragments.from_words(words, DIM, PAGE).transpose(-1, -2)


def stored(codes, part):
    """Return codes [P, D] in stored order [words, 8]."""
    return fragments.to_words(codes if part == "k" else codes.T)


@pytest.mark.parametrize("settings", SETTINGS, ids=["default", "mean", "k64v32"])
@pytest.mark.parametrize("seed", range(3))
def test_codes_and_metadata_equal_the_scalar_model(cache_like_pages, settings, seed):
    pages = cache_like_pages(num=2, page_size=PAGE, heads=2, head_dim=DIM, seed=seed)
    # One channel is so small that its scale falls below the record's floor, and one is constant.
    for part in pages:
        part[..., 3] *= 1e-7
        part[..., 4] = 0.75
    layout = anchor_layout(settings, PAGE, DIM)
    corrections_layout = residual_layout(settings, "int8", PAGE, DIM, torch.float32)
    anchors, residuals = log4.encode(*pages, settings, layout, corrections_layout)
    for part, page, chunk in zip("kv", pages, (settings.k_chunk, settings.v_chunk), strict=True):
        packed = layout[f"{part}_codes"].view(anchors).unflatten(-1, (-1, 4))
        codes = by_token(fragments.unpack_sign_magnitude(packed), part)
        packed = corrections_layout[f"{part}_codes"].view(residuals).unflatten(-1, (-1, 4))
        corrections = by_token(fragments.by_halves(nibbles.unpack_signed(packed)), part)
        base = layout["scale_base"].view(anchors)[..., "kv".index(part), None, None].int()
        scales = fragments.LOAD[part](layout[f"{part}_scale"].view(anchors)).int() + base
        centres = fragments.LOAD[part](layout[f"{part}_centre"].view(anchors))
        for n, h in ((0, 0), (1, 1)):
            want = model_encode(page[n, :, h].tolist(), chunk, settings)
            got = codes, corrections, centres, scales
            for name, expected, actual in zip(
                ("codes", "corrections", "centres", "scales"), want, got, strict=True
            ):
                found = actual[n, h].tolist()
                wrong = {at: found[at[0]][at[1]] for at in expected}
                wrong = {at: (x, expected[at]) for at, x in wrong.items() if x != expected[at]}
                assert not wrong, f"{part} {name} (got, expected): {wrong}"


def test_all_256_code_pairs_decode_to_the_formula():
    settings = Log4Settings.for_page(32)
    layout = anchor_layout(settings, 32, DIM)
    corrections_layout = residual_layout(settings, "int8", 32, DIM, torch.float32)
    anchors = layout.empty_records((1, 1), "cpu")
    residuals = corrections_layout.empty_records((1, 1), "cpu")
    # Token t in 0..15 holds anchor code t, and channel d the correction nibble d.
    codes = torch.arange(32)[:, None].expand(32, DIM) % 16
    corrections = torch.arange(DIM)[None].expand(32, DIM)
    centre, scale = -0.625, 1.75
    for part in "kv":
        words = fragments.pack_sign_magnitude(stored(codes, part))
        layout[f"{part}_codes"].view(anchors).copy_(words.flatten())
        words = fragments.pack_by_halves(stored(corrections, part))
        corrections_layout[f"{part}_codes"].view(residuals).copy_(words.flatten())
        layout[f"{part}_centre"].view(anchors).fill_(centre)
        layout[f"{part}_scale"].view(anchors).fill_(9)
    layout["scale_base"].view(anchors).fill_((fp32_bits(scale) >> 19) - 9)

    args = (settings, layout, corrections_layout, torch.float32)
    k, v = log4.decode_refined(anchors, residuals, *args)
    levels = log4.decode_anchor(anchors, settings, layout, torch.float32)[0]
    for anchor in range(16):
        magnitude = anchor & 7
        sign = 1 if anchor < 8 else -1
        for nibble in range(16):
            integer = max(16 * magnitude - (nibble if nibble < 8 else nibble - 16), 0)
            a = settings.alpha
            level = ((1 + a) ** (integer / settings.top) - 1) / a if a else integer / settings.top
            want = centre + scale * sign * level
            assert k[0, anchor, 0, nibble].item() == pytest.approx(want, rel=1e-6, abs=1e-6)
        want = centre + scale * sign * companding.magnitude_levels(settings)[magnitude]
        assert levels[0, anchor, 0].tolist() == pytest.approx([want] * DIM, abs=1e-6)
    assert torch.equal(k, v)


@pytest.mark.parametrize("settings", SETTINGS, ids=["default", "mean", "k64v32"])
def test_every_integer_and_sign_splits_into_four_bits_each(settings):
    """The encoder of `x = value(I)` finds I again, for every I and sign, as 16 m - correction."""
    law = companding.tables(settings, torch.device("cpu"))
    integers = torch.arange(settings.top + 1)
    x = torch.tensor([companding.expand(i, settings) for i in integers.tolist()])
    chunks = torch.cat((x, -x[1:]))[None, None, :, None, None]
    one, zero = torch.ones(1, 1, 1, 1, 1), torch.zeros(1, 1, 1, 1, 1)
    packed, corrections = log4._quantise(chunks, zero, one, law, settings, True)
    codes = packed.flatten().long()
    magnitude = codes & 7
    assert corrections is not None
    corrections = corrections.flatten()
    assert magnitude.min() == 0
    assert magnitude.max() == 7
    assert corrections.min() >= -8
    assert corrections.max() <= 7
    assert torch.equal(16 * magnitude - corrections, torch.cat((integers, integers[1:])))
    assert torch.equal(codes >= 8, chunks.flatten() < 0)


def test_minus_zero_code_keeps_the_sign():
    levels = companding.signed_levels(Log4Settings())
    assert len(set(levels)) == 16
    assert levels[8] == -levels[0] < 0


@pytest.mark.parametrize(
    "settings",
    [Log4Settings(), Log4Settings(alpha=2.0, top=112, levels="interval", last_level=0.5)],
    ids=["linear", "interval"],
)
def test_levels_lie_inside_their_intervals(settings):
    levels = companding.magnitude_levels(settings)
    edges = companding.tables(settings, torch.device("cpu")).magnitude_edges.tolist()
    for level, (low, high) in zip(levels, pairwise([0.0, *edges, 1.0]), strict=True):
        assert low < level < high
