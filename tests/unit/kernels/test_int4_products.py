"""Products with weights in 4 bits: right on every tile, with any number of parts."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from kvspec_kernels.jit.cuda_int4_products import CudaTile, aligned
from kvspec_kernels.ops import int4_products
from kvspec_kernels.ops.capture import captured_graph
from kvspec_kernels.ops.int4_products import (
    CHUNK,
    CUDA_TILES,
    MOST_ROWS,
    TILES,
    Tile,
    bytes_of,
    choose_cuda_tile,
    choose_tile,
    empty,
    multiply,
    multiply_in_cuda,
    num_programs,
    product,
    repacked,
    write_rows,
)
from kvspec_kernels.reference.int4_weights import GROUP, Int4Weight, decode, round_to_nearest

BF16 = torch.bfloat16
# Without a GPU both are Triton.
BACKENDS = ("auto", "triton") if torch.cuda.is_available() else ("auto",)
# Columns and inputs: less than a tile and a group, whole tiles and chunks, ends inside each.
SHAPES = [(40, 24), (64, CHUNK), (72, 100), (130, 2 * CHUNK + 72), (24, 5 * CHUNK)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Allocate results and partial sums as NaN, so that none is read before it is written."""
    plain = torch.Tensor.new_empty

    def new_nans(tensor, *size, **options):
        empty = plain(tensor, *size, **options)
        return empty.fill_(float("nan")) if empty.is_floating_point() else empty

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nans)


def draw(num_rows, num_columns, num_inputs, device):
    """Return rows, a weight and a bias. Groups differ in scale and zero by more than rounding."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(num_columns, num_inputs, generator=rng)
    groups = torch.arange(num_inputs) // GROUP
    weight = weight * (1.0 + groups) + 0.5 * (groups % 3)
    x = torch.randn(num_rows, num_inputs, generator=rng) + 0.25
    bias = torch.randn(num_columns, generator=rng)
    encoded = round_to_nearest(weight)
    moved = Int4Weight(*(part.to(device) for part in encoded[:3]), encoded.num_inputs)
    return x.to(BF16).to(device), moved, bias.to(BF16).to(device)


def limit_of(x, weight, bias, expected, decoded):
    """Return how far a product may be from the exact one.

    Sums of K terms in fp32 are within K 2^-23 of the sum of the terms' sizes, also where the
    matrix instruction cuts off instead of rounding. Scaled sums have terms x (128 + u) s and
    x (z - 128 s), up to |x| (271 s + |z|). Decoded weights are within 2^-8 of their size. The
    result is rounded to bf16 once, by up to 2^-8 of its size.
    """
    size = x.abs().double()
    scale, zero = (
        part.double().repeat_interleave(GROUP, 1)[:, : weight.num_inputs]
        for part in (weight.scale, weight.zero)
    )
    terms = size @ (271 * scale + zero.abs()).t() + bias.abs().double()
    limit = terms * (weight.num_inputs + 8) * 2**-23 + expected.abs() * 2**-8
    if decoded:
        limit += size @ decode(weight).abs().double().t() * 2**-8
    return limit


def assert_product(out, x, weight, bias=None, decoded=True):
    x, out = x.cpu(), out.cpu()
    weight = Int4Weight(*(part.cpu() for part in weight[:3]), weight.num_inputs)
    added = torch.zeros(len(weight.codes)) if bias is None else bias.cpu()
    assert out.shape == (len(x), len(weight.codes))
    assert out.dtype == BF16
    expected = x.double() @ decode(weight).double().t() + added.double()
    limit = limit_of(x, weight, added, expected, decoded)
    error = (out.double() - expected).abs()
    assert bool((error <= limit).all()), float((error - limit).max())


def name_of(tile: Tile) -> str:
    return f"{tile.rows}x{tile.columns}{'' if tile.decoded else '-scaled'}"


# Programs that share out 2 to 5 tiles of 4 chunks each: one, fewer than tiles, more than tiles, and
# more than chunks.
@pytest.mark.parametrize("programs", [1, 3, 7, 9, 100])
@pytest.mark.parametrize("tile", TILES, ids=name_of)
def test_every_tile_equals_the_reference(tile, programs, device, monkeypatch):
    monkeypatch.setattr(int4_products, "num_programs", lambda most, *sizes: min(most, prod(sizes)))
    monkeypatch.setattr(int4_products, "num_multiprocessors", lambda device: programs)
    num_rows = tile.rows - 3
    x, weight, bias = draw(num_rows, 136, 3 * CHUNK + 72, device)
    packed = repacked(weight)
    for added in (None, bias):
        out = multiply(x, packed, added, replace(tile, programs=1))
        assert_product(out, x, weight, added, tile.decoded)
    assert not packed.arrived.any()


@pytest.mark.parametrize("tile", int4_products.CHOSEN.values(), ids=name_of)
def test_vocabularies_of_many_tiles_equal_the_reference(tile, device, monkeypatch):
    """Each program has several tiles, and ends inside one. The last tile is not whole."""
    monkeypatch.setattr(int4_products, "num_multiprocessors", lambda device: 7)
    x, weight, _ = draw(5, 40 * 64 + 24, CHUNK + 72, device)
    packed = repacked(weight)
    for _ in range(2):
        out = multiply(x, packed, None, replace(tile, programs=1))
        assert_product(out, x, weight, None, tile.decoded)
        assert not packed.arrived.any()


def cuda_name_of(tile: CudaTile) -> str:
    return f"{tile.rows}x{tile.columns}"


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 3, 7, 9, 100])
@pytest.mark.parametrize("num_columns", [2, 130, 136])
@pytest.mark.parametrize("tile", CUDA_TILES, ids=cuda_name_of)
def test_every_cuda_tile_equals_the_reference(tile, num_columns, programs, device, monkeypatch):
    monkeypatch.setattr(int4_products, "num_programs", lambda most, *sizes: min(most, prod(sizes)))
    monkeypatch.setattr(int4_products, "num_multiprocessors", lambda device: programs)
    for num_rows in (1, tile.rows - 3, tile.rows):
        x, weight, bias = draw(num_rows, num_columns, 3 * CHUNK + 72, device)
        packed = repacked(weight)
        for added in (None, bias):
            out = multiply_in_cuda(x, packed, added, replace(tile, programs=1))
            assert_product(out, x, weight, added, decoded=False)
        assert not packed.arrived.any()


@pytest.mark.gpu
def test_few_rows_run_in_cuda(device):
    x, _, bias = draw(17, 40, 136, device)
    assert choose_cuda_tile(x[:1], 40, bias) == CUDA_TILES[0]
    assert choose_cuda_tile(x[:9], 40) == CUDA_TILES[1]
    # More rows, odd columns, inputs that are no multiple of 8, another dtype.
    for rows, num_columns in ((x, 40), (x[:1], 41), (x[:1, :100], 40), (x[:1].half(), 40)):
        assert choose_cuda_tile(rows, num_columns) is None
    # Biases that the kernel cannot read as pairs of bf16.
    for other in (bias.float(), bias[1:], bias.repeat_interleave(2)[::2]):
        assert choose_cuda_tile(x[:1], 40, other) is None


def test_other_devices_run_in_triton():
    x, _, _ = draw(1, 40, 136, "cpu")
    assert choose_cuda_tile(x, 40) is None


def test_rows_are_copied_where_they_lie_between_16_bytes():
    whole = torch.zeros(4, 137, dtype=BF16)
    for x in (
        whole[:, :136],
        whole.view(-1)[1:545].view(4, 136),
        torch.zeros(136, 4, dtype=BF16).t(),
    ):
        copy = aligned(x)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, x)
    kept = torch.zeros(4, 136, dtype=BF16)
    assert aligned(kept) is kept


@pytest.mark.parametrize(
    ("num_tiles", "num_chunks", "programs"),
    [
        (448, 16, 396),
        (96, 16, 384),
        (64, 16, 256),
        (64, 56, 256),
        (1, 3, 1),
        (396, 1, 396),
        (2004, 16, 396),
    ],
)
def test_tiles_that_fit_are_not_cut_across(num_tiles, num_chunks, programs):
    assert num_programs(396, num_tiles, num_chunks) == programs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_rows", [1, 3, 16, 33, 64, 70])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_the_reference(shape, num_rows, backend, device):
    x, weight, bias = draw(num_rows, *shape, device)
    assert_product(product(x, repacked(weight), bias, backend), x, weight, bias)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_product_runs_on_the_back_end_that_is_asked_for(backend, monkeypatch):
    monkeypatch.setattr(int4_products, "choose_cuda_tile", lambda *args: CUDA_TILES[0])
    monkeypatch.setattr(int4_products, "multiply_in_cuda", lambda *args: "cuda")
    monkeypatch.setattr(int4_products, "multiply", lambda *args: "triton")
    x, weight, _ = draw(1, 40, 136, "cpu")
    assert product(x, repacked(weight), None, backend) == backend


def test_back_ends_that_do_not_cover_a_product_are_refused():
    x, weight, _ = draw(1, 40, 136, "cpu")
    with pytest.raises(ValueError, match=r"backend 'cuda' needs .* got x \[1, 136\] on cpu"):
        product(x, repacked(weight), None, "cuda")
    with pytest.raises(ValueError, match="backend must be auto, cuda or triton, got 'hip'"):
        product(x, repacked(weight), None, "hip")


def test_scaled_sums_are_as_precise_as_fp32(device):
    """Take away what rounding to bf16 hides: results near zero."""
    x, weight, _ = draw(16, 64, 2 * CHUNK, device)
    x[:, CHUNK:] = -x[:, :CHUNK]
    twice = Int4Weight(
        weight.codes[:, : CHUNK // 2].repeat(1, 2),
        weight.scale[:, : CHUNK // GROUP].repeat(1, 2),
        weight.zero[:, : CHUNK // GROUP].repeat(1, 2),
        weight.num_inputs,
    )
    tile = next(tile for tile in TILES if not tile.decoded)
    out = multiply(x, repacked(twice), None, tile)
    assert_product(out, x, twice, decoded=False)
    cuda_tile = choose_cuda_tile(x, 64)
    if cuda_tile is not None:
        out = multiply_in_cuda(x, repacked(twice), None, cuda_tile)
        assert_product(out, x, twice, decoded=False)


@pytest.mark.parametrize("part", ["scale", "zero", "codes"])
def test_groups_that_are_swapped_are_found(part, device):
    """Swap two groups of a chunk in the packed weight: the comparison must fail."""
    x, weight, _ = draw(3, 40, CHUNK, device)
    values = getattr(weight, part).clone()
    groups = values.view(len(values), CHUNK // GROUP, -1)
    groups[:, [1, 2]] = groups[:, [2, 1]]
    out = product(x, repacked(weight._replace(**{part: values})))
    with pytest.raises(AssertionError):
        assert_product(out, x, weight)


def test_no_rows(device):
    x, weight, bias = draw(0, 40, 100, device)
    assert product(x, repacked(weight), bias).shape == (0, 40)


def test_rows_of_any_layout(device):
    x, weight, _ = draw(16, 40, 136, device)
    packed = repacked(weight)
    for moved in (x.t().contiguous().t(), torch.nn.functional.pad(x, (1, 0))[:, 1:]):
        assert not moved.is_contiguous()
        assert torch.equal(product(moved, packed), product(x, packed))


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    x, weight, bias = draw(3, 40, 136, "cpu")
    packed = repacked(weight)
    with pytest.raises(ValueError, match="must be bf16"):
        product(x.half(), packed)
    with pytest.raises(ValueError, match=r"x \[3, 128\] does not fit a weight of 136 inputs"):
        product(x[:, :128], packed)
    with pytest.raises(ValueError, match=r"bias \[39\] does not fit 40 columns"):
        product(x, packed, bias[:39])


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 65, 1000])
def test_chosen_tiles_fit(num_rows):
    for chosen in (int4_products.CHOSEN, int4_products.CHOSEN_SMALL):
        assert choose_tile(chosen, num_rows).rows >= min(num_rows, MOST_ROWS)


def test_a_weight_takes_as_many_bytes_as_before():
    _, weight, _ = draw(1, 64, CHUNK, "cpu")
    packed = repacked(weight)
    assert packed.words.nbytes + packed.affine.nbytes == weight.nbytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_known_before_a_weight_is_packed(shape):
    _, weight, _ = draw(1, *shape, "cpu")
    assert bytes_of(*shape) == repacked(weight).nbytes


def test_rows_are_replaced_in_place(device):
    """Graphs hold addresses, and zeroed counters of arrivals."""
    x, weight, _ = draw(3, 130, 2 * CHUNK + 72, device)
    packed = empty(130, weight.num_inputs, x.device)
    places = [part.data_ptr() for part in packed[:3]]
    for begin, end in ((64, 130), (0, 64)):
        rows = Int4Weight(*(part[begin:end] for part in weight[:3]), weight.num_inputs)
        write_rows(packed, begin, rows)
    assert [part.data_ptr() for part in packed[:3]] == places
    assert all(map(torch.equal, packed[:3], repacked(weight)[:3]))
    assert_product(product(x, packed), x, weight)


def test_rows_that_do_not_fit_are_refused():
    _, weight, _ = draw(1, 8, 100, "cpu")
    for num_columns, num_inputs, begin in ((8, 100, 1), (8, 164, 0), (8, 100, -1)):
        with pytest.raises(ValueError, match="do not fit a weight"):
            write_rows(empty(num_columns, num_inputs, torch.device("cpu")), begin, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 48])
def test_graphs_replay_products(num_rows, device):
    x, weight, bias = draw(num_rows, 4096, 4096, device)
    packed = repacked(weight)
    product(x, packed, bias)
    torch.cuda.synchronize()
    with captured_graph() as graph:
        out = product(x, packed, bias)
    for _ in range(20):
        out.fill_(float("nan"))
        x.mul_(-1)
        graph.replay()
        assert_product(out, x, weight, bias)
    assert torch.equal(out, product(x, packed, bias))
    # New weights, as after an update of the model: the graph multiplies with these.
    other = weight._replace(zero=-weight.zero)
    write_rows(packed, 0, other)
    graph.replay()
    assert_product(out, x, other, bias)
