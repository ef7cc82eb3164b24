"""Promises of all wire codecs: shapes, sizes, refusals, and the decoding of extreme pages."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.codecs import make_codec
from sglang_kvspec.codecs.wire import make_wire_codec
from sglang_kvspec.core.errors import CodecError, ConfigError
from sglang_kvspec.kv.geometry import KVGeometry

NAMES = ["full", "int8", "int4", "cachegen"]
LOSSY = NAMES[1:]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS_TYPE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def geometry_of(**overrides) -> KVGeometry:
    options = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 16, "page_size": 32}
    return KVGeometry(**(options | {"dtype": torch.float32} | overrides))


@pytest.fixture
def page_of(cache_like_pages):
    """Return a function that makes one page (k, v) [num_layers, page_size, num_kv_heads, head_dim]
    of a geometry."""

    def make(geometry, seed=0):
        return cache_like_pages(
            num=geometry.num_layers,
            page_size=geometry.page_size,
            heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            dtype=geometry.dtype,
            seed=seed,
        )

    return make


def relative_error(got, want):
    spread = want.double() - want.double().mean(1, keepdim=True)
    return ((got.double() - want.double()).square().sum() / spread.square().sum()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [32, 64, 96])
@pytest.mark.parametrize(("name", "error"), [("full", 0), ("int8", 1e-4), ("int4", 2e-2)])
def test_fixed_size_pages_come_back(page_of, name, error, page_size, dtype):
    geometry = geometry_of(page_size=page_size, dtype=dtype)
    codec = make_wire_codec(name, geometry)
    page = page_of(geometry)
    payload = codec.encode(*page)
    assert payload.shape == (codec.max_page_bytes,)
    assert payload.dtype == torch.uint8
    for got, want in zip(codec.decode(payload), page, strict=True):
        assert got.shape == want.shape
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert relative_error(got, want) <= error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_carries_every_bit(dtype):
    """Bits include NaN with payloads, infinities, both zeros and denormals."""
    geometry = geometry_of(dtype=dtype)
    codec = make_wire_codec("full", geometry)
    rng = torch.Generator().manual_seed(1)
    shape = (3, 32, 2, 16 * dtype.itemsize)
    raw = torch.randint(0, 256, (2, *shape), dtype=torch.uint8, generator=rng)
    k, v = raw.view(dtype)
    assert k.isnan().any()
    for got, want in zip(codec.decode(codec.encode(k, v)), (k, v), strict=True):
        bits = BITS_TYPE[dtype]
        assert torch.equal(got.view(bits), want.view(bits))


@pytest.mark.parametrize("name", NAMES)
def test_strides_and_places_in_memory_do_not_matter(page_of, name):
    geometry = geometry_of(dtype=torch.bfloat16)
    codec = make_wire_codec(name, geometry)
    k, v = page_of(geometry)
    payload = codec.encode(k, v)
    head_major = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (k, v)]
    assert torch.equal(codec.encode(*head_major), payload)
    want = codec.decode(payload)
    spread = torch.full((2 * payload.numel() + 1,), 255, dtype=torch.uint8)
    spread[1::2] = payload
    shifted = torch.cat((payload[:1], payload))[1:]
    for placed in (spread[1::2], shifted):
        for got, part in zip(codec.decode(placed), want, strict=True):
            assert torch.equal(got, part)


@pytest.mark.parametrize("name", NAMES)
def test_decoded_pages_outlive_their_payload(page_of, name):
    geometry = geometry_of()
    codec = make_wire_codec(name, geometry)
    payload = codec.encode(*page_of(geometry))
    decoded = codec.decode(payload)
    before = [part.clone() for part in decoded]
    payload.fill_(255)
    for got, want in zip(decoded, before, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.375, 96.0, 2.0**-14])
def test_constant_pages(name, value):
    geometry = geometry_of(dtype=torch.bfloat16)
    codec = make_wire_codec(name, geometry)
    page = torch.full((3, 32, 2, 16), value, dtype=torch.bfloat16)
    for got in codec.decode(codec.encode(page, page)):
        if name == "cachegen" and value:
            # The scale of an anchor token is rounded to bf16. Differences from that token are
            # constant, too.
            assert (got.float() - page.float()).abs().max() <= abs(value) * 2**-7
        else:
            assert torch.equal(got, page)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", ["denormal", "large"])
def test_the_ends_of_the_range_keep_their_size(page_of, name, dtype, magnitude):
    geometry = geometry_of(dtype=dtype)
    codec = make_wire_codec(name, geometry)
    size = torch.finfo(dtype).tiny if magnitude == "denormal" else torch.finfo(dtype).max / 2
    if name == "cachegen":
        size = min(size, 2.0**47)
    ordinary = page_of(geometry_of())
    page = [(part.double() / part.abs().max() * size).to(dtype) for part in ordinary]
    for got, want in zip(codec.decode(codec.encode(*page)), page, strict=True):
        assert got.isfinite().all()
        assert (got.double() - want.double()).abs().max() <= 0.3 * size


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_whole_range_of_fp32_stays_finite(name):
    codec = make_wire_codec(name, geometry_of())
    page = torch.full((3, 32, 2, 16), torch.finfo(torch.float32).max)
    page[:, ::2] *= -1
    page[..., ::3] *= 0.5
    for got in codec.decode(codec.encode(page, page)):
        assert got.isfinite().all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["K", "V"])
def test_lossy_codecs_refuse_what_is_not_finite(page_of, name, bad, which):
    geometry = geometry_of()
    codec = make_wire_codec(name, geometry)
    k, v = page_of(geometry)
    (k if which == "K" else v)[1, 9, 0, 3] = bad
    with pytest.raises(CodecError, match=rf"{which} holds {bad} at .*\[1, 9, 0, 3\]; {name}"):
        codec.encode(k, v)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_another_kind_are_refused(name):
    codec = make_wire_codec(name, geometry_of())
    page = torch.zeros(3, 32, 2, 16)
    with pytest.raises(CodecError, match=r"K of a page must be \[3, 32, 2, 16\], got \[2, 32"):
        codec.encode(page[:2], page)
    with pytest.raises(CodecError, match=r"V of a page must be torch.float32 on the CPU, got"):
        codec.encode(page, page.half())
    with pytest.raises(CodecError, match=r"K of a page must be .* got torch.float32 on meta"):
        codec.encode(page.to("meta"), page)
    payload = codec.encode(page, page)
    for wrong in (payload.view(1, -1), payload.view(torch.int8), payload.to("meta")):
        with pytest.raises(CodecError, match="a payload must be uint8"):
            codec.decode(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_payloads_of_another_length_are_refused(page_of, name):
    geometry = geometry_of()
    codec = make_wire_codec(name, geometry)
    payload = codec.encode(*page_of(geometry))
    too_long = torch.zeros(codec.max_page_bytes + 1, dtype=torch.uint8)
    longer = torch.cat((payload, payload[:1]))
    for wrong in (payload[:-1], payload[:4], payload[:0], too_long, longer):
        with pytest.raises(CodecError, match=rf"bytes, got {wrong.numel()}"):
            codec.decode(wrong)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_int4_costs_what_the_anchors_cost(head_dim, page_size):
    geometry = geometry_of(num_kv_heads=8, head_dim=head_dim, page_size=page_size)
    options = {"page_size": page_size, "head_dim": head_dim, "dtype": torch.float32}
    anchors = 3 * 8 * make_codec("uniform4", target="int8", **options).anchor_bytes
    int4, int8, full = (
        make_wire_codec(name, geometry).max_page_bytes for name in ("int4", "int8", "full")
    )
    assert 0.9 * anchors <= int4 <= 1.1 * anchors
    assert int8 - int4 == full // 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"page_size": 48}, "--page-size must be a multiple of 32 .* got 48"),
        ({"num_layers": 0}, "the number of layers must be at least 1, got 0"),
        ({"num_kv_heads": 0}, "the number of KV heads of a rank must be at least 1, got 0"),
        ({"head_dim": 17}, "head size must be even, got 17"),
        ({"dtype": torch.int8}, "KV cache dtype must be one of .* got torch.int8"),
    ],
)
def test_geometries_that_no_page_has_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        make_wire_codec("full", geometry_of(**overrides))


def test_split_is_no_wire_codec():
    with pytest.raises(ConfigError, match="one of full, int8, int4, cachegen, got 'split'"):
        make_wire_codec("split", geometry_of())
