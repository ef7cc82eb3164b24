"""int8 and int4 on the wire: the formula, the groups, and the rounding of their metadata."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.codecs.wire import make_wire_codec
from sglang_kvspec.codecs.wire.rounding import bf16_at_least, bf16_at_most
from sglang_kvspec.core.errors import CodecError
from sglang_kvspec.kv.geometry import KVGeometry

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=16, page_size=32, dtype=torch.float32)
# Groups: a channel of K, and a token's head of V.
GROUP = {"k": 1, "v": 3}


@pytest.fixture(params=["int8", "int4"])
def codec(request):
    return make_wire_codec(request.param, GEOMETRY)


@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(-20, 20).map(lambda e: 2.0**e),
    offset=st.floats(-1e4, 1e4),
)
@pytest.mark.parametrize("bits", [8, 4])
def test_no_error_exceeds_half_a_scale(bits, seed, spread, offset):
    codec = make_wire_codec(f"int{bits}", GEOMETRY)
    rng = torch.Generator().manual_seed(seed)
    k, v = torch.randn((2, 2, 32, 2, 16), generator=rng) * spread + offset
    payload = codec.encode(k, v)
    for part, got, want in zip("kv", codec.decode(payload), (k, v), strict=True):
        scale = codec.layout[f"{part}_scale"].view(payload).float()
        slack = 2**-22 * (abs(offset) + 8 * spread)
        assert ((got - want).abs() <= scale / 2 + slack).all()
        low, high = want.aminmax(dim=GROUP[part], keepdim=True)
        # Rounding may widen the range by no more than the metadata's own precision.
        widest = (high - low + low.abs() * 2**-7) * (1 + 2**-6) / (2**bits - 1)
        assert (scale <= widest + slack).all()


def test_every_code_decodes_to_the_formula(codec):
    payload = codec.layout.empty_records((), torch.device("cpu"))
    top = 2**codec.bits
    codes = torch.arange(2 * 32 * 2 * 16).view(2, 32, 2, 16) * 7 % top
    for part in ("k", "v"):
        packed = codes if codec.bits == 8 else codes[..., ::2] + 16 * codes[..., 1::2]
        codec.layout[f"{part}_codes"].view(payload).copy_(packed)
        codec.layout[f"{part}_scale"].view(payload).fill_(0.375)
        codec.layout[f"{part}_zero"].view(payload).fill_(-1.25)
    # One group of each part differs from the others.
    codec.layout["k_scale"].view(payload)[1, 0, 1, 5] = 2.0
    codec.layout["v_zero"].view(payload)[0, 9, 1, 0] = 3.0
    k, v = codes * 0.375 - 1.25, codes * 0.375 - 1.25
    k[1, :, 1, 5] = codes[1, :, 1, 5] * 2.0 - 1.25
    v[0, 9, 1] = codes[0, 9, 1] * 0.375 + 3.0
    for got, want in zip(codec.decode(payload), (k, v), strict=True):
        assert torch.equal(got, want)


def test_an_outlier_hurts_its_own_group_alone(codec):
    rng = torch.Generator().manual_seed(0)
    k, v = torch.randn((2, 2, 32, 2, 16), generator=rng)
    k[1, 5, 0, 7] = v[1, 5, 0, 7] = 1e4
    clean = codec.decode(codec.encode(k, v))
    hurt = torch.stack([(got - want).abs() > 0.3 for got, want in zip(clean, (k, v), strict=True)])
    allowed = torch.zeros_like(hurt)
    allowed[0, 1, :, 0, 7] = True
    allowed[1, 1, 5, 0] = True
    assert hurt.sum() > 30
    assert not (hurt & ~allowed).any()


@pytest.mark.parametrize("name", ["k_scale", "k_zero", "v_scale", "v_zero"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_metadata_that_no_page_has_is_refused(codec, name, value):
    page = torch.ones(2, 32, 2, 16)
    payload = codec.encode(page, page)
    codec.layout[name].view(payload).view(-1)[3] = value
    if name.endswith("zero") and value == -1.0:
        codec.decode(payload)
        return
    with pytest.raises(CodecError, match=f"points of {name[0].upper()} must be finite"):
        codec.decode(payload)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_metadata_decode_to_finite_values(dtype):
    geometry = KVGeometry(1, 1, 16, 32, dtype)
    codec = make_wire_codec("int8", geometry)
    payload = torch.full((codec.max_page_bytes,), 255, dtype=torch.uint8)
    for part in ("k", "v"):
        for name in ("scale", "zero"):
            field = codec.layout[f"{part}_{name}"].view(payload)
            field.fill_(torch.finfo(torch.bfloat16).max)
    for got in codec.decode(payload):
        assert (got == torch.finfo(dtype).max).all()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_goes_one_way_and_no_further(x):
    value = torch.tensor([x])
    above, below = bf16_at_least(value), bf16_at_most(value)
    largest = torch.finfo(torch.bfloat16).max
    for got in (above, below):
        assert torch.equal(got, got.bfloat16().float())
    assert above >= min(x, largest)
    assert below <= max(x, -largest)
    # Neighbours in bf16, or the same number.
    apart = above.bfloat16().view(torch.int16).int() - below.bfloat16().view(torch.int16).int()
    assert above == below or apart.abs() == 1 or abs(x) > largest or above * below == 0
