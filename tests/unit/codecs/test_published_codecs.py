"""Codecs of KIVI, KVQuant, RotateKV and TurboQuant against naive loops of the papers' formulas."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy import integrate, linalg

from kvspec_kernels.codecs import FormatError
from kvspec_kernels.codecs.kivi import KiviSettings
from kvspec_kernels.codecs.kvquant import KVQuantSettings
from kvspec_kernels.codecs.rotatekv import RotateKVSettings
from kvspec_kernels.codecs.turboquant import TurboQuantSettings
from kvspec_kernels.formats import anchor_layout
from kvspec_kernels.reference import (
    bit_packing,
    hadamard,
    kivi,
    kvquant,
    page_levels,
    rotatekv,
    turboquant,
)
from kvspec_kernels.reference.lloyd_max import levels
from sglang_kvspec.codecs import make_codec

P, D = 64, 48
SETTINGS = (KiviSettings, KVQuantSettings, RotateKVSettings, TurboQuantSettings)
ROTATING = [(rotatekv, RotateKVSettings()), (turboquant, TurboQuantSettings())]

by_bits = pytest.mark.parametrize("bits", [2, 3, 4])


@pytest.fixture
def pages(cache_like_pages):
    return cache_like_pages(num=2, page_size=P, head_dim=D)


def encode(codec, settings, pages):
    layout = anchor_layout(settings, pages[0].shape[1], pages[0].shape[3])
    return codec.encode(*pages, settings, layout)[0], layout


def bf16(number: float) -> float:
    return torch.tensor(number).bfloat16().item()


def uniform(group: torch.Tensor, bits: int) -> tuple[list[float], float]:
    """Return the values that a group decodes to, by the formula, and the largest error allowed."""
    low, high = group.min().item(), group.max().item()
    zero = bf16(low)
    scale = bf16((high - zero) / (2**bits - 1))
    codes = [min(max(round((x - zero) / scale), 0), 2**bits - 1) for x in group.tolist()]
    # Half a step, and what rounding to bf16 moved zero and the largest value.
    return [code * scale + zero for code in codes], scale / 2 + (abs(low) + abs(high)) / 128


@by_bits
def test_kivi_is_the_formula_by_channel_of_k_and_by_token_of_v(pages, bits):
    settings = KiviSettings(anchor_bits=bits)
    records, layout = encode(kivi, settings, pages)
    drafts = kivi.decode_anchor(records, settings, layout, torch.float32)
    # A head of 48 has V groups of 16 channels.
    for part, got, x in zip("kv", drafts, pages, strict=True):
        if part == "k":
            places = [(slice(t, t + 32), c) for t in (0, 32) for c in range(D)]
        else:
            places = [(t, slice(c, c + 16)) for t in range(P) for c in (0, 16, 32)]
        for tokens, channels in places:
            at = (1, tokens, 1, channels)
            want, bound = uniform(x[at], bits)
            torch.testing.assert_close(got[at], torch.tensor(want))
            assert ((got[at] - x[at]).abs() <= bound).all()


@by_bits
def test_rotatekv_is_the_formula_on_rotated_tokens(pages, bits):
    settings = RotateKVSettings(anchor_bits=bits)
    records, layout = encode(rotatekv, settings, pages)
    drafts = rotatekv.decode_anchor(records, settings, layout, torch.float32)
    rotated = rotatekv.decode_rotated(records, settings, layout)
    matrix = torch.tensor(linalg.block_diag(*[linalg.hadamard(16) / 4] * 3)).float()
    for got, turned, x in zip(drafts, rotated, pages, strict=True):
        for token in range(P):
            want, bound = uniform(matrix @ x[1, token, 1], bits)
            assert ((turned[1, 1, token] - matrix @ x[1, token, 1]).abs() <= bound).all()
            # A value in the middle of two codes may be rounded to either.
            far = (turned[1, 1, token] - torch.tensor(want)).abs() > 1e-4
            assert far.sum() <= 1
            torch.testing.assert_close(got[1, token, 1], matrix @ turned[1, 1, token])


@by_bits
def test_turboquant_is_the_formula_on_unit_blocks(pages, bits):
    settings = TurboQuantSettings(anchor_bits=bits)
    records, layout = encode(turboquant, settings, pages)
    drafts = turboquant.decode_anchor(records, settings, layout, torch.float32)
    table = torch.tensor(levels(16, bits))
    rotation = turboquant.rotate(torch.eye(D), settings).T
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(D))
    for got, x in zip(drafts, pages, strict=True):
        for token in range(P):
            want = torch.empty(D)
            for block in range(0, D, 16):
                at = slice(block, block + 16)
                norm = bf16(x[1, token, 1, at].double().norm().item())
                turned = rotation[at, at] @ (x[1, token, 1, at] / norm)
                nearest = (turned[:, None] - table).abs().argmin(1)
                want[at] = rotation[at, at].T @ (table[nearest] * norm)
            torch.testing.assert_close(got[1, token, 1], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dim", [16, 80, 96, 128])
def test_hadamard_is_the_matrix_in_blocks(dim):
    block = dim & -dim
    matrix = linalg.block_diag(*[linalg.hadamard(block) / math.sqrt(block)] * (dim // block))
    x = torch.randn(5, dim)
    torch.testing.assert_close(hadamard.rotate(x), x @ torch.tensor(matrix).float().T)
    torch.testing.assert_close(hadamard.rotate(hadamard.rotate(x)), x)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(("codec", "settings"), ROTATING, ids=lambda x: getattr(x, "name", ""))
def test_rotating_query_and_output_is_rotating_k_and_v_back(
    cache_like_pages, codec, settings, head_dim
):
    pages = cache_like_pages(num=1, head_dim=head_dim)
    records, layout = encode(codec, settings, pages)
    k, v = (x[0, :, 0] for x in codec.decode_anchor(records, settings, layout, torch.float32))
    turned_k, turned_v = (x[0, 0] for x in codec.decode_rotated(records, settings, layout))
    if codec is turboquant:
        rotate = [lambda x: turboquant.rotate(x, settings)]
        rotate.append(lambda x: turboquant.rotate_back(x, settings))
    else:
        rotate = [hadamard.rotate, hadamard.rotate]
    q, weights = torch.randn(4, head_dim), torch.rand(4, k.shape[0]).softmax(1)
    torch.testing.assert_close(rotate[0](q) @ turned_k.T, q @ k.T, atol=2e-3, rtol=1e-5)
    torch.testing.assert_close(rotate[1](weights @ turned_v), weights @ v, atol=1e-5, rtol=1e-5)


# Lloyd's and Max's levels of the normal distribution, and the paper's distortions.
NORMAL = {
    1: [0.7979],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}
DISTORTION = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}


@pytest.mark.parametrize("bits", NORMAL)
def test_levels_of_many_dimensions_are_those_of_the_normal_distribution(bits):
    dim = 1 << 14
    table = torch.tensor(levels(dim, bits), dtype=torch.float64) * dim**0.5
    torch.testing.assert_close(table.flip(0), -table)
    upper = torch.tensor(NORMAL[bits], dtype=torch.float64)
    torch.testing.assert_close(table[len(upper) :], upper, atol=0, rtol=1e-3)


@pytest.mark.parametrize("bits", NORMAL)
@pytest.mark.parametrize("dim", [16, 128])
def test_each_level_is_the_mean_of_the_values_next_to_it(dim, bits):
    def density(x: float) -> float:
        return (1 - x * x) ** ((dim - 3) / 2)

    table = levels(dim, bits)
    edges = [-1.0, *((a + b) / 2 for a, b in pairwise(table)), 1.0]
    whole, error = integrate.quad(density, -1, 1, points=[0])[0], 0.0
    for level, (low, high) in zip(table, pairwise(edges), strict=True):
        mass = integrate.quad(density, low, high)[0]
        mean = integrate.quad(lambda x: x * density(x), low, high)[0] / mass
        assert mean == pytest.approx(level, rel=1e-5)
        part = integrate.quad(lambda x, at=level: (x - at) ** 2 * density(x), low, high)[0]
        error += part / whole
    assert dim * error == pytest.approx(DISTORTION[bits], rel=0.2)


@by_bits
def test_kvquant_keeps_outliers_apart_and_takes_the_nearest_level(pages, bits):
    settings = KVQuantSettings(anchor_bits=bits)
    records, layout = encode(kvquant, settings, pages)
    drafts = kvquant.decode_anchor(records, settings, layout, torch.float32)
    for index, (part, got, x) in enumerate(zip("kv", drafts, pages, strict=True)):
        values, draft = x[1, :, 1], got[1, :, 1]
        stored = {f.name[2:]: f.view(records)[1, 1] for f in layout.fields if f.name[0] == part}
        table = layout["levels"].view(records)[1, 1, index].tolist()
        places = stored["places"].tolist()
        assert places == naive_outliers(values, 0 if part == "k" else 1, len(places))
        counts = [0] * 256
        for token in range(P):
            for channel in range(D):
                vector = channel if part == "k" else token
                centre = stored["centre"][vector].item()
                reach = stored["reach"][vector].item()
                value, place = values[token, channel].item(), token * D + channel
                if place in places:
                    assert draft[token, channel] == bf16(value)
                    continue
                unit = min(max((value - centre) / reach, -1), 1)
                counts[min(int((unit + 1) * 128), 255)] += 1
                best = min(abs(unit - level) for level in table)
                error = abs(draft[token, channel].item() - value) / reach
                assert error == pytest.approx(best, abs=1e-2)
        want = naive_levels(counts, 2**bits)
        torch.testing.assert_close(torch.tensor(table), torch.tensor(want), atol=2e-2, rtol=0)


def naive_outliers(values: torch.Tensor, dim: int, count: int) -> list[int]:
    """Return the places of the values furthest from the median of their vector, in units of the
    median distance."""
    rows = values.T if dim == 0 else values
    scores = []
    for i, row in enumerate(rows.tolist()):
        median = torch.tensor(row).median()
        distance = (torch.tensor(row) - median).abs()
        for j, score in enumerate((distance / distance.median()).tolist()):
            scores.append((-score, j * D + i if dim == 0 else i * D + j))
    return sorted(place for _, place in sorted(scores)[:count])


def naive_levels(counts: list[int], num_levels: int) -> list[float]:
    """Return levels by k-means over the centres of 256 bins, from a uniform grid."""
    table = [2 * i / (num_levels - 1) - 1 for i in range(num_levels)]
    for _ in range(page_levels.ITERATIONS):
        members: list[list[float]] = [[] for _ in table]
        for i, count in enumerate(counts):
            centre = (2 * i + 1) / 256 - 1
            nearest = min(range(num_levels), key=lambda at: abs(table[at] - centre))
            members[nearest] += [centre] * count
        table = [
            sum(group) / len(group) if group else old
            for group, old in zip(members, table, strict=True)
        ]
    return table


def test_fitted_levels_err_less_than_a_uniform_grid():
    values = (torch.randn(1, 1, 4096) / 3).clamp(-1, 1)
    fitted = page_levels.fit(values, torch.ones(values.shape, dtype=torch.bool), 3)
    grid = torch.linspace(-1, 1, 8, dtype=torch.float16).view(1, 1, 8)
    errors = [
        (table.float().gather(-1, page_levels.nearest(values, table).long()) - values)
        .square()
        .mean()
        for table in (fitted, grid)
    ]
    assert errors[0] < 0.8 * errors[1]


def test_places_beyond_fifteen_bits_come_back():
    settings = KVQuantSettings()
    x = torch.randn(1, 256, 1, 256)
    x[0, 255, 0, 255] = 1000.0
    records, layout = encode(kvquant, settings, (x, x))
    for draft in kvquant.decode_anchor(records, settings, layout, torch.float32):
        assert draft[0, 255, 0, 255] == 1000.0


@pytest.mark.parametrize(
    ("name", "bits_of"),
    [
        ("kivi", {2: 3.0, 3: 4.0, 4: 5.0}),
        ("rotatekv", {2: 2.25, 3: 3.25, 4: 4.25}),
        ("turboquant", {2: 2.125, 3: 3.125, 4: 4.125}),
        # 0.375 of ranges, 0.344 of outliers, and the levels.
        ("kvquant", {2: 2.7265625, 3: 3.734375, 4: 4.75}),
    ],
)
def test_bits_of_an_element(name, bits_of):
    for bits, want in bits_of.items():
        sizes = {"page_size": 64, "head_dim": 128, "dtype": torch.bfloat16}
        codec = make_codec(name, target="exact", anchor_bits=bits, **sizes)
        assert codec.anchor_bits_per_element == want


def test_first_choice_is_the_default():
    for declared in SETTINGS:
        assert declared().anchor_bits == declared.bit_choices[0]
        assert declared.for_page(64) == declared()
        with pytest.raises(FormatError, match=r"anchor_bits must be (2, 3|3, 2) or 4, got 5$"):
            declared(anchor_bits=5)


def test_signs_of_the_rotation_do_not_change():
    signs = turboquant._signs(16, 0, torch.device("cpu"))
    digest = bit_packing.unpack(torch.tensor([0x5F, 0xEC], dtype=torch.uint8), 1)
    assert signs.tolist() == (1.0 - 2 * digest).tolist()
