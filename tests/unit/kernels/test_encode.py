"""The encode kernels against the references: every byte of every record."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from kvspec_kernels.formats import FormatError, Log4Settings, Uniform4Settings, anchor_layout
from kvspec_kernels.jit.cuda_encode import EncodeShape, supported
from kvspec_kernels.ops import encoding
from kvspec_kernels.ops.capture import captured_graph
from kvspec_kernels.ops.encode import encode_pages
from kvspec_kernels.reference.codec import reference_of
from kvspec_kernels.reference.companding import tables
from kvspec_testkit.kernels import encoding as both
from kvspec_testkit.kernels.encoding import POISON, encode_by_reference, make_pages, poisoned
from kvspec_testkit.kernels.interpreter import exact_fma

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SETTINGS = {"log4": Log4Settings, "uniform4": Uniform4Settings}
TARGETS = ["int8", "exact"]

by_codec = pytest.mark.parametrize("codec", list(SETTINGS))
by_target = pytest.mark.parametrize("target", TARGETS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def skip_unless_covered(encoder, k, settings, target, device):
    shape = EncodeShape(settings, target, k.shape[1], k.shape[3], k.dtype)
    if encoder == "cuda" and not supported(shape, device):
        pytest.skip("not a case of the CUDA back end")


def encode(k, v, settings, target, device, encoder, **options):
    skip_unless_covered(encoder, k, settings, target, device)
    return both.encode(k, v, settings, target, device, backend=encoder, **options)


def assert_same_records(k, v, settings, target, device, encoder):
    skip_unless_covered(encoder, k, settings, target, device)
    both.assert_same_records(k, v, settings, target, device, encoder)


@by_codec
@by_target
@by_dtype
@pytest.mark.parametrize(("page_size", "head_dim"), [(32, 96), (64, 64)])
def test_records_are_those_of_the_reference(
    codec, target, dtype, page_size, head_dim, device, encoder
):
    k, v = make_pages(1, page_size, 1, head_dim, dtype)
    assert_same_records(k, v, SETTINGS[codec].for_page(page_size), target, device, encoder)


@by_codec
@pytest.mark.parametrize(
    ("page_size", "head_dim"), [(32, 16), (96, 80), (64, 128), (160, 32), (256, 16), (32, 256)]
)
def test_awkward_sizes(codec, page_size, head_dim, device, encoder):
    k, v = make_pages(1, page_size, 1, head_dim, torch.bfloat16)
    assert_same_records(k, v, SETTINGS[codec].for_page(page_size), "int8", device, encoder)


@pytest.mark.parametrize(
    "settings",
    [
        Log4Settings(k_chunk=16, v_chunk=16),
        Log4Settings(k_chunk=96, v_chunk=48),
        Log4Settings(k_chunk=32, v_chunk=96, alpha=8.0, top=105),
        Log4Settings(k_chunk=32, v_chunk=32, alpha=0.25, top=120),
        Log4Settings(k_chunk=32, v_chunk=32, alpha=1e-3),
        Log4Settings(k_chunk=32, v_chunk=32, alpha=64.0),
        Uniform4Settings(k_group=16),
        Uniform4Settings(k_group=96),
    ],
    ids=str,
)
def test_other_settings(settings, device, encoder):
    k, v = make_pages(1, 96, 1, 32, torch.float32)
    assert_same_records(k, v, settings, "int8", device, encoder)


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 0.05, 0.25, 1.0, 8.0, 64.0])
def test_thresholds_and_their_neighbours(alpha, device, encoder):
    """Centre 0 and scale 1, so that magnitudes are the values: one step to either side of every
    edge between two integers."""
    settings = Log4Settings(alpha=alpha)
    edges = tables(settings, torch.device("cpu")).integer_edges
    infinity = torch.tensor(math.inf)
    near = torch.cat((edges, edges.nextafter(infinity), edges.nextafter(-infinity)))
    near = torch.cat((near, -near, near / 3))
    page = torch.zeros(64, 64)
    page[1:61, :].view(-1)[: len(near)] = near
    page[0], page[32], page[31], page[63] = 1.0, 1.0, -1.0, -1.0
    pages = page.view(1, 64, 1, 64)
    assert_same_records(pages, pages.flip(3).contiguous(), settings, "int8", device, encoder)


def extreme_pages(dtype):
    """Return named pages [1, 64, 1, 32] at the ends of the range of floats."""
    info = torch.finfo(dtype)
    random = torch.randn(1, 64, 1, 32, generator=torch.Generator().manual_seed(1)).double()
    unit = random / random.abs().max()
    zero = torch.zeros(1, 64, 1, 32, dtype=torch.float64)
    # Four channels of each kind. In a page of one kind alone the scales differ.
    kinds = torch.cat(
        [
            torch.where(random > 0, 0.0, -0.0)[..., :4],
            (zero * -1)[..., :4],
            (zero + 1.2345)[..., :4],
            (zero - 1234.5)[..., :4],
            (zero + 2.0**-14)[..., :4],
            torch.where(random > 0, 1.0, -0.0)[..., :4],
            (random * 4).round()[..., :4] / 8,
            unit[..., :4],
        ],
        dim=-1,
    )
    lone = zero.clone()
    lone[0, 7, 0, 3] = -info.max
    # A constant channel that is 2^220 times larger than the changes of the others.
    beside = unit * 2.0 ** (-14 if dtype == torch.float16 else -100)
    beside[..., 5] = 2.0 ** (14 if dtype == torch.float16 else 120)
    # Values of a channel differ by 1 in the last bit. In fp32 their range over 15 may round to 0.
    steps = (1.875 + torch.arange(32) % 16 / 128) / info.eps + (random > 0)
    pages = {
        "negative zeros": zero * -1,
        "constant": zero + 1.2345,
        "kinds": kinds,
        "denormal": unit * info.tiny,
        "smallest": (unit * 9).round() * info.smallest_normal * 2.0**-7,
        "huge": unit * info.max / 2,
        "lone": lone,
        "beside": beside,
        "steps": steps,
        "spread": unit * (2.0 ** torch.linspace(-24, 12, 32, dtype=torch.float64)),
    }
    if dtype == torch.float16:
        # A program takes the interpreter a tenth of a second, and the other pages are alike in all
        # dtypes.
        pages = {name: pages[name] for name in ("kinds", "denormal", "smallest", "huge", "beside")}
    return {name: page.to(dtype) for name, page in pages.items()}


@by_codec
@by_dtype
def test_extreme_values(codec, dtype, device, encoder):
    pages = extreme_pages(dtype)
    k = torch.cat(list(pages.values()))
    v = k.roll(1, dims=0)
    settings = SETTINGS[codec].for_page(64)
    anchors, residuals, _ = encode(k, v, settings, "int8", device, encoder)
    wanted = encode_by_reference(k, v, settings, "int8")
    for index, name in enumerate(pages):
        assert torch.equal(anchors[index], wanted[0][index]), name
        assert torch.equal(residuals[index], wanted[1][index]), name


@pytest.mark.parametrize("top", [105, 120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_integers(top, dtype, device, encoder):
    """bf16 values beyond the largest scale, whose integers are clamped. fp16 has no such values."""
    k, v = make_pages(1, 64, 1, 32, dtype)
    largest = torch.finfo(dtype).max
    k[:, 3], k[:, 40], k[:, 41, :, ::2] = largest, -largest, largest * 0.985
    assert_same_records(k, v, Log4Settings(top=top), "int8", device, encoder)


@pytest.mark.parametrize("step", [1, 2, 7, 11])
def test_denormal_scales(step, device, encoder):
    """A scale of few bits is rounded so much that codes are clipped. In units of the smallest bf16
    number, a range of 15 * step + 7 has the scale `step`."""
    units = torch.arange(64)[:, None] * 37 + torch.arange(32) * 11
    k = (units % (15 * step + 8)).to(torch.int16).view(torch.bfloat16).view(1, 64, 1, 32)
    assert_same_records(k, k.flip(1), Uniform4Settings(), "int8", device, encoder)
    assert_same_records(k, k.flip(1), Uniform4Settings(), "exact", device, encoder)


@by_codec
def test_the_whole_range_of_fp32_stays_finite(codec, device, encoder):
    page = torch.full((1, 64, 1, 32), torch.finfo(torch.float32).max)
    page[:, ::2] *= -1
    page[..., ::3] *= 0.5
    settings = SETTINGS[codec].for_page(64)
    if codec == "log4":
        assert_same_records(page, page, settings, "int8", device, encoder)
    anchors, _, _ = encode(page, page, settings, "exact", device, encoder)
    layout = anchor_layout(settings, 64, 32)
    decoded = reference_of(settings).decode_anchor(anchors, settings, layout, torch.float32)
    assert all(part.isfinite().all() for part in decoded)


@by_codec
@by_dtype
def test_exact_residuals_hold_bits_that_are_no_numbers(codec, dtype, device, encoder):
    k, v = make_pages(2, 32, 1, 32, dtype)
    k[0, 3, 0, 1], k[0, 4, 0, 1], v[0, 5, 0, 2] = math.nan, math.inf, -math.inf
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    # All bits set, and a NaN that arithmetic would make quiet.
    quiet = torch.finfo(dtype).max
    v.view(bits)[0, 9, 0, 3] = -1
    v.view(bits)[0, 9, 0, 4] = torch.tensor(quiet, dtype=dtype).view(bits) + 2
    settings = SETTINGS[codec].for_page(32)
    anchors, residuals, _ = encode(k, v, settings, "exact", device, encoder)
    wanted = encode_by_reference(k, v, settings, "exact")
    assert torch.equal(residuals, wanted[1])
    assert torch.equal(anchors[1], wanted[0][1])
    encode(k, v, settings, "int8", device, encoder)


@by_codec
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_skipped_entries_write_nothing(codec, index_dtype, device, encoder):
    k, v = make_pages(3, 32, 1, 32, torch.bfloat16)
    settings = SETTINGS[codec].for_page(32)
    got = encode(
        k, v, settings, "exact", device, encoder, source=[2, -1, 0, -1], index_dtype=index_dtype
    )
    for records, wanted in zip(got[:2], encode_by_reference(k, v, settings, "exact"), strict=True):
        assert torch.equal(records[[0, 2]], wanted[[2, 0]])
        assert (records[[1, 3]] == POISON).all()


@by_codec
@by_target
def test_strided_pages_and_pools(codec, target, device, encoder):
    k, v = make_pages(2, 32, 2, 32, torch.float16)
    fused = torch.stack((k, v), dim=3).to(device)
    settings = SETTINGS[codec].for_page(32)
    wanted = encode_by_reference(k, v, settings, target)
    pools = [torch.zeros(2, 3, r.shape[-1] + 16, dtype=torch.uint8, device=device) for r in wanted]
    anchors, residuals = (pool[:, 1:, :-16] for pool in pools)
    index = torch.arange(2, device=device)
    skip_unless_covered(encoder, k, settings, target, device)
    args = (index, anchors, index, residuals, index, settings, target, encoder)
    encode_pages(fused[:, :, :, 0], fused[:, :, :, 1], *args)
    assert torch.equal(anchors.cpu(), wanted[0])
    assert torch.equal(residuals.cpu(), wanted[1])
    for pool in pools:
        assert not pool[:, 0].any()
        assert not pool[..., -16:].any()


def test_nothing_to_do(device, encoder):
    k, v = make_pages(1, 32, 1, 32, torch.bfloat16)
    encode(k, v, Log4Settings.for_page(32), "exact", device, encoder, source=[])


def test_what_does_not_fit_is_refused(device):
    k, v = (page.to(device) for page in make_pages(1, 32, 2, 16, torch.bfloat16))
    settings = Log4Settings.for_page(32)
    anchors, residuals = (
        records.to(device) for records in encode_by_reference(k, v, settings, "int8")
    )
    index = torch.zeros(1, dtype=torch.int32, device=device)

    def call(
        k=k, v=v, source=index, anchors=anchors, settings=settings, target="int8", backend="auto"
    ):
        encode_pages(k, v, source, anchors, index, residuals, index, settings, target, backend)

    call()
    with pytest.raises(ValueError, match="backend must be auto, cuda or triton"):
        call(backend="numpy")
    with pytest.raises(ValueError, match="a head size that is a multiple of 32"):
        call(backend="cuda")
    with pytest.raises(FormatError, match="mean depends on the order"):
        call(settings=Log4Settings(v_chunk=32, centre="mean"))
    with pytest.raises(FormatError, match=r"alpha up to 64.0, got 100"):
        call(settings=Log4Settings(v_chunk=32, alpha=100))
    with pytest.raises(FormatError, match="multiples of 16 tokens"):
        call(settings=Log4Settings(k_chunk=8, v_chunk=32))
    with pytest.raises(ValueError, match=r"anchors must be uint8 \[slots, 2, "):
        call(anchors=anchors[:, :1])
    with pytest.raises(ValueError, match=r"residuals must be uint8 \[slots, 2, 2048\]"):
        call(target="exact")
    with pytest.raises(ValueError, match=r"k and v must be .* of equal shape"):
        call(v=v[:, :, :1])
    with pytest.raises(ValueError, match="equal strides"):
        call(v=v.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="must be fp32, bf16 or fp16"):
        call(k=k.double(), v=v.double())
    with pytest.raises(ValueError, match=r"source must be contiguous \[1\] int32 or int64"):
        call(source=index.float())


def test_exact_fma_rounds_once():
    cases = torch.tensor(
        [
            [1 + 2.0**-12, 1 + 2.0**-12, -1.0],
            [1 + 2.0**-23, 1 - 2.0**-23, -1.0],
            [1.5, 2.0**-24, 1.0],
            [2.0**-75, 2.0**-75, 0.0],
            [2.0**-30, 2.0**-30, 1 + 2.0**-23],
            # Half an fp32 step and a little more. fp64 alone would lose that little and round to
            # even.
            [1 + 2.0**-20, 2.0**-24, 1.0],
            [2.0**-24, 1.0, 1.0],
        ]
    )
    for a, b, c in cases:
        want = Fraction(a.item()) * Fraction(b.item()) + Fraction(c.item())
        got = exact_fma(a[None], b[None], c[None]).item()
        ulps = [torch.tensor(got).nextafter(torch.tensor(s * math.inf)).item() for s in (1, -1)]
        assert all(abs(Fraction(got) - want) <= abs(Fraction(other) - want) for other in ulps)


@pytest.mark.gpu
@by_codec
@by_target
@by_dtype
@pytest.mark.parametrize("page_size", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_all_sizes(codec, target, dtype, page_size, head_dim, device, encoder):
    k, v = make_pages(5, page_size, 3, head_dim, dtype)
    assert_same_records(k, v, SETTINGS[codec].for_page(page_size), target, device, encoder)


@pytest.mark.gpu
@by_dtype
@pytest.mark.parametrize(
    "settings", [Log4Settings(), Log4Settings(alpha=0.25), Uniform4Settings()], ids=str
)
def test_many_random_values(settings, dtype, device, encoder):
    """Enough elements to reach quotients next to thresholds: 8 million for each dtype."""
    k, v = make_pages(64, 64, 8, 128, dtype, seed=3)
    assert_same_records(k, v, settings, "int8", device, encoder)


@pytest.mark.gpu
@by_codec
def test_offsets_beyond_32_bits(codec, device, encoder):
    """Pages, anchors and residuals of the last slots lie beyond 2^31 elements."""
    settings = SETTINGS[codec].for_page(64)
    k, v = make_pages(2, 64, 2, 128, torch.bfloat16)
    wanted = encode_by_reference(k, v, settings, "exact")
    last = 2**31 // k[0].numel() + 2
    sources = []
    for page in (k, v):
        sources.append(torch.zeros(last, *page.shape[1:], dtype=page.dtype, device=device))
        sources[-1][-2:] = page.to(device)
    pools, slots = [], []
    for records in wanted:
        # The kernel counts in words of 4 bytes.
        num_slots = 2**33 // records[0].numel() + 2
        pools.append(torch.zeros(num_slots, *records.shape[1:], dtype=torch.uint8, device=device))
        slots.append(torch.tensor([num_slots - 1, num_slots - 2], device=device))
    source = torch.tensor([last - 1, last - 2], device=device)
    places = (pools[0], slots[0], pools[1], slots[1])
    encode_pages(*sources, source, *places, settings, "exact", encoder)
    for pool, records in zip(pools, wanted, strict=True):
        assert torch.equal(pool[-2:].cpu(), records)


@pytest.mark.gpu
@by_codec
def test_replay_in_a_graph_with_other_indices(codec, device, encoder):
    settings = SETTINGS[codec].for_page(64)
    k, v = make_pages(4, 64, 2, 64, torch.bfloat16)
    wanted = encode_by_reference(k, v, settings, "exact")
    pools = [poisoned(6, records, device) for records in wanted]
    source = torch.tensor([0, -1, -1], device=device)
    slots = torch.tensor([5, 5, 5], device=device)
    args = (source, pools[0], slots, pools[1], slots, settings, "exact", encoder)
    on_device = k.to(device), v.to(device)
    encode_pages(*on_device, *args)
    with captured_graph() as graph:
        encode_pages(*on_device, *args)
    for pool in pools:
        pool.fill_(POISON)
    source.copy_(torch.tensor([3, -1, 1]))
    slots.copy_(torch.tensor([0, 1, 2]))
    graph.replay()
    for pool, records in zip(pools, wanted, strict=True):
        got = pool.cpu()
        assert torch.equal(got[[0, 2]], records[[3, 1]])
        assert (got[[1, 3, 4, 5]] == POISON).all()


def test_edges_of_the_law_are_a_step_apart():
    """Check the promise of `_law`: the pushed law exceeds the true one by less than a step, and by
    more than an error of 2^-22 in its logarithm and of 2^-24 in the sum below it."""
    for alpha in (0.05, 0.25, 1.0, 8.0, 64.0):
        settings = Log4Settings(alpha=alpha)
        a, pushed, slope = encoding.encode_constants(
            settings, "int8", 64, 64, torch.bfloat16
        ).launch["LAW"]
        pushed = torch.tensor(pushed).item()
        edges = tables(settings, torch.device("cpu")).integer_edges.double()
        for index, edge in enumerate(edges.tolist()):
            inner = pushed + a * edge
            value = slope * math.log2(inner)
            error = slope * (2**-22 * max(1, math.log2(inner)) + 2**-24 / math.log(2))
            assert index + 0.5 + error < value < index + 1.0, (alpha, index)
