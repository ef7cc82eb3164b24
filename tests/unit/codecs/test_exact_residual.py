"""The exact residual restores every bit, whatever the bits are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.codecs import make_codec

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
# -0.0, infinities, quiet and signalling NaNs with payloads, and the smallest and largest denormal.
SPECIAL = {
    4: [0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFF800123, 1, 0x807FFFFF, 0x7F7FFFFF],
    2: [0x8000, 0x7F80, 0xFC00, 0x7FC1, 0xFF83, 1, 0x807F, 0x7C01],
}


def assert_bit_exact(codec_name: str, dtype: torch.dtype, bits: torch.Tensor) -> None:
    """Check that K and V are restored. bits: integers [2, N, P, H, D] of K and V."""
    codec = make_codec(
        codec_name, target="exact", page_size=bits.shape[2], head_dim=bits.shape[4], dtype=dtype
    )
    k, v = bits.view(dtype)
    back = codec.decode_target(*codec.encode(k, v))
    for got, want in zip(back, bits, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got.view(BITS[dtype]), want)


@pytest.mark.parametrize("dtype", BITS, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_bit_pattern_survives(dtype, data):
    name = data.draw(st.sampled_from(["log4", "uniform4"]))
    page_size = data.draw(st.sampled_from([32, 64, 96]))
    heads = data.draw(st.integers(1, 2))
    width = dtype.itemsize
    seed = data.draw(st.integers(0, 2**31 - 1))
    shape = (2, 1, page_size, heads, 16)
    rng = torch.Generator().manual_seed(seed)
    top = 1 << (8 * width - 1)
    bits = torch.randint(-top, top, shape, generator=rng).to(BITS[dtype])
    drawn = data.draw(
        st.lists(
            st.one_of(st.sampled_from(SPECIAL[width]), st.integers(0, 2 * top - 1)),
            min_size=1,
            max_size=32,
        )
    )
    signed = [x - 2 * top if x >= top else x for x in drawn]
    bits.view(-1)[: len(signed)] = torch.tensor(signed, dtype=BITS[dtype])
    assert_bit_exact(name, dtype, bits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_65536_half_precision_patterns(codec_name, dtype):
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(1, 32, 64, 2, 16)
    assert_bit_exact(codec_name, dtype, bits.expand(2, -1, -1, -1, -1).contiguous())


def test_residual_does_not_depend_on_the_anchor(cache_like_pages, codec_of):
    codec = codec_of(target="exact")
    k, v = cache_like_pages()
    anchor, residual = codec.encode(k, v)
    back = codec.decode_target(torch.full_like(anchor, 0xA5), residual)
    assert torch.equal(back[0], k)
    assert torch.equal(back[1], v)
