"""Products with weights in two parts: right on every tile, with any number of programs."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from two_parts.parts import decode, decode_first, encode

HAS_CUDA = torch.cuda.is_available()
# Triton reads the variable where a kernel is defined, so at this import.
with pytest.MonkeyPatch.context() as patch:
    if not HAS_CUDA:
        patch.setenv("TRITON_INTERPRET", "1")
    from two_parts import products
    from two_parts.products import CHUNK, TILES, multiply, packed, reconstruct

BF16 = torch.bfloat16
DEVICE = torch.device("cuda:0" if HAS_CUDA else "cpu")
# Columns and inputs: less than a tile and a plane, whole tiles and chunks, ends inside each.
SHAPES = [(40, 24), (64, CHUNK), (72, 101), (130, 2 * CHUNK + 72)]

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if not HAS_CUDA:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Allocate results and partial sums as NaN, so that none is read before it is written."""
    plain = torch.Tensor.new_empty

    def new_nans(tensor, *size, **options):
        empty = plain(tensor, *size, **options)
        return empty.fill_(float("nan")) if empty.is_floating_point() else empty

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nans)


def draw(num_rows, num_columns, num_inputs):
    """Return rows and a weight, whose rows differ in scale. It has zeros, small values and a row of
    zeros."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(num_columns, num_inputs, generator=rng)
    weight *= torch.exp2(torch.arange(num_columns) % 7 - 9.0)[:, None]
    weight[:, 3] = 0.0
    weight[1::2, num_inputs // 2] *= 2.0**-18
    weight[5] = 0.0
    x = torch.randn(num_rows, num_inputs, generator=rng) + 0.25
    return x.to(BF16).to(DEVICE), encode(weight.to(BF16).to(DEVICE))


def assert_product(out, x, value):
    """Compare with the product in fp64. Sums of K terms in fp32 are within K 2^-23 of the sum of
    the terms' sizes. Numbers in the places of listed values add 2^-15 of the largest one each. The
    result is rounded to bf16, by up to 2^-8 of its size."""
    out, x, value = out.double().cpu(), x.double().cpu(), value.double().cpu()
    expected = x @ value.t()
    terms = x.abs() @ (value.abs() + value.abs().amax(1, keepdim=True) * 2**-15).t()
    limit = terms * (x.shape[1] + 8) * 2**-23 + expected.abs() * 2**-8
    error = (out - expected).abs()
    assert out.shape == expected.shape
    assert bool((error <= limit).all()), float((error - limit).max())


@pytest.mark.parametrize("both", [False, True], ids=["first", "both"])
# Programs that share out 2 or 3 tiles of 4 chunks each: one, fewer than tiles, more than tiles, and
# more than chunks.
@pytest.mark.parametrize("programs", [1, 5, 100])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_equals_the_reference(tile, programs, both, monkeypatch):
    monkeypatch.setattr(products, "num_programs", lambda most, *sizes: min(most, prod(sizes)))
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: programs)
    x, parts = draw(tile.rows - 3, 136, 3 * CHUNK + 72)
    weight = packed(parts)
    out = multiply(x, weight, both=both, tile=replace(tile, programs=1))
    assert_product(out, x, decode(parts) if both else decode_first(parts))
    assert not weight.arrived.any()


@pytest.mark.parametrize("both", [False, True], ids=["first", "both"])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 70])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_the_reference(shape, num_rows, both):
    x, parts = draw(num_rows, *shape)
    out = multiply(x, packed(parts), both=both, tile=TILES[0])
    assert_product(out, x, decode(parts) if both else decode_first(parts))


def test_the_second_part_matters():
    x, parts = draw(3, 64, CHUNK)
    out = multiply(x, packed(parts), both=False, tile=TILES[0])
    with pytest.raises(AssertionError):
        assert_product(out, x, decode(parts))


def test_each_weight_is_exact():
    """Multiply with the unit matrix, which gives the weights themselves, also the listed ones."""
    _, parts = draw(1, 72, CHUNK)
    unit = torch.eye(CHUNK, dtype=BF16, device=DEVICE)
    out = multiply(unit, packed(parts), both=True, tile=TILES[-1])
    expected = decode(parts).t().float()
    assert bool((expected[CHUNK // 2, 1::2].abs() < 2.0**-16).all())
    # A listed value is the sum of the number in its place and of a difference, in fp32.
    listed = torch.zeros_like(expected, dtype=torch.bool)
    entries, rows = (parts.small_at >= 0).nonzero(as_tuple=True)
    listed[parts.small_at[entries, rows].long(), rows] = True
    assert torch.equal(out.float()[~listed], expected[~listed])
    limit = parts.scale * 2.0**-39 + expected.abs() * 2.0**-8
    assert bool(((out.float() - expected).abs() <= limit)[listed].all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_is_reconstructed(shape):
    _, parts = draw(1, *shape)
    out = torch.full(shape, float("nan"), dtype=BF16, device=DEVICE)
    assert reconstruct(packed(parts), out) is out
    assert torch.equal(out.view(torch.int16), decode(parts).view(torch.int16))


def test_what_does_not_fit_is_refused():
    x, parts = draw(3, 40, 72)
    weight = packed(parts)
    for wrong in (x.half(), x[:, :64]):
        with pytest.raises(ValueError, match="must be bf16"):
            multiply(wrong, weight, both=True, tile=TILES[0])
    with pytest.raises(ValueError, match="must be contiguous bf16"):
        reconstruct(weight, torch.empty(40, 64, dtype=BF16))
