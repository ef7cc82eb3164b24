"""Products with weights: right, and with the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.ops import products
from kvspec_kernels.ops.products import LARGE, SMALL, Tile, choose_tile, multiply, product, takes

BF16, FP16 = torch.bfloat16, torch.float16
TILES = LARGE.all
# Rows, columns and depth: less than a tile, borders of tiles, and a depth that ends inside a step.
SHAPES = [(1, 40, 64), (64, 64, 256), (65, 72, 136), (130, 264, 512), (257, 8, 72)]
# Half a unit in the last place.
ROUNDING = {BF16: 2**-8, FP16: 2**-11}


def name_of(tile: Tile) -> str:
    return f"{tile.rows}x{tile.columns}{'' if tile.bulk else '-loads'}-{tile.num_stages}"


def draw(shape, dtype, device):
    num_rows, num_columns, depth = shape
    rng = torch.Generator().manual_seed(0)
    sizes = ((num_rows, depth), (num_columns, depth), (num_columns,))
    return [torch.randn(size, generator=rng).to(dtype).to(device) for size in sizes]


def assert_within_rounding(out, rows, weight, bias=None):
    """Compare with a sum in fp64. Sums of K terms in fp32 are within K * 2**-24 of the sum of the
    terms' sizes, and are rounded once."""
    a, b = rows.cpu().double(), weight.cpu().double()
    added = torch.zeros(len(b)) if bias is None else bias.cpu().double()
    expected, size = a @ b.t() + added, a.abs() @ b.abs().t() + added.abs()
    limit = size * (a.shape[1] + 1) * 2**-24 + expected.abs() * ROUNDING[out.dtype]
    error = (out.cpu().double() - expected).abs()
    assert bool((error <= limit).all()), float((error - limit).max())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=name_of)
def test_equals_the_reference(tile, shape, dtype, device):
    rows, weight, bias = draw(shape, dtype, device)
    for added in (None, bias):
        out = multiply(rows, weight, added, tile)
        assert out.shape == shape[:2]
        assert out.dtype == dtype
        assert_within_rounding(out, rows, weight, added)


@pytest.mark.parametrize("tile", SMALL.wide, ids=name_of)
def test_tiles_of_smaller_gpus_equal_the_reference(tile, device):
    rows, weight, bias = draw((130, 264, 136), BF16, device)
    assert_within_rounding(multiply(rows, weight, bias, tile), rows, weight, bias)


@pytest.mark.parametrize("num_rows", [1, 64, 65, 300])
def test_chooses_a_tile_by_the_number_of_rows(num_rows, device):
    rows, weight, bias = draw((num_rows, 72, 136), BF16, device)
    assert_within_rounding(product(rows, weight, bias), rows, weight, bias)


def test_no_rows(device):
    rows, weight, bias = draw((0, 72, 136), BF16, device)
    assert product(rows, weight, bias).shape == (0, 72)


@pytest.mark.parametrize("layout", ["transposed", "unaligned", "every second row"])
def test_rows_of_any_layout(layout, device):
    rows, weight, _ = draw((70, 72, 136), BF16, device)
    moved = {
        "transposed": lambda: rows.t().contiguous().t(),
        "unaligned": lambda: torch.nn.functional.pad(rows, (1, 0))[:, 1:],
        "every second row": lambda: rows.repeat_interleave(2, dim=0)[::2],
    }[layout]()
    assert not moved.is_contiguous()
    assert torch.equal(product(moved, weight), product(rows, weight))


def test_takes_what_the_kernels_can_read():
    rows, weight, _ = draw((3, 72, 136), BF16, "cpu")
    assert takes(rows, weight)
    assert takes(rows[:0], weight)
    assert takes(rows.half(), weight.half())
    refused = {
        "fp32": (rows.float(), weight.float()),
        "two dtypes": (rows, weight.half()),
        "a transposed weight": (rows, weight.t().contiguous().t()),
        "rows of 270 bytes": (rows[:, :135], weight[:, :135].contiguous()),
        "an unaligned weight": (rows[:, :128], weight[:, 1:129]),
    }
    for name, (a, b) in refused.items():
        assert not takes(a, b), name
        with pytest.raises(ValueError, match="must be both bf16 or both fp16"):
            product(a, b)


def test_shapes_that_do_not_fit_are_refused():
    rows, weight, bias = draw((3, 72, 136), BF16, "cpu")
    with pytest.raises(ValueError, match=r"rows \[3, 128\] do not fit the weight \[72, 136\]"):
        product(rows[:, :128], weight)
    with pytest.raises(ValueError, match=r"bias \[71\] does not fit"):
        product(rows, weight, bias[:71])


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "expected"),
    [
        (1, 4096, LARGE.narrow),
        (64, 4224, LARGE.narrow),
        (64, 4256, LARGE.plain),
        (65, 4096, LARGE.wide[0]),
        (104, 6144, LARGE.wide[1]),
        (208, 6144, LARGE.wide[2]),
        (8192, 4096, LARGE.wide[3]),
    ],
)
def test_tiles_fill_the_multiprocessors(num_rows, num_columns, expected):
    """An H100 has 132. The expected tiles were the fastest there, or within 4 %."""
    assert choose_tile(LARGE, num_rows, num_columns, 132) == expected


def test_tiles_that_split_the_sum_are_found(monkeypatch, device):
    """Put a product that depends on the tile in place of one of them."""
    whole = products.multiply

    def by_tile(rows, weight, bias, tile):
        if tile is not LARGE.plain:
            return whole(rows, weight, bias, tile)
        half = rows.shape[1] // 2
        first, second = (
            whole(rows[:, part].contiguous(), weight[:, part].contiguous(), None, tile).float()
            for part in (slice(None, half), slice(half, None))
        )
        return (first + second).to(rows.dtype)

    monkeypatch.setattr(products, "multiply", by_tile)
    monkeypatch.setattr(products, "DEPTH_OF_CHECK", 256)
    assert not products.equal_tiles(device, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_all_tiles_give_the_same_bits(dtype, device):
    assert products.equal_tiles(device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("num_columns", [576, 4096, 28672])
def test_rows_do_not_depend_on_their_number(num_columns, device):
    rows, weight, bias = draw((4096, num_columns, 1536), BF16, device)
    whole = product(rows, weight, bias)
    for count in (1, 2, 63, 64, 65, 128, 129, 208, 257, 1000):
        for start in (0, 1234, 4096 - count):
            part = slice(start, start + count)
            assert torch.equal(product(rows[part], weight, bias), whole[part]), (start, count)
