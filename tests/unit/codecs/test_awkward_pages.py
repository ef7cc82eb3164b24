"""Both codecs on ordinary and on extreme pages."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.errors import CodecError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def squared_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return (got.double() - want.double()).square().sum().item()


def decode_both(codec, k, v):
    encoded = codec.encode(k, v)
    return codec.decode_anchor(encoded.anchor), codec.decode_target(*encoded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [32, 64, 96, 256])
def test_int8_is_far_closer_than_the_anchor(codec_of, cache_like_pages, dtype, page_size):
    codec = codec_of(dtype=dtype, page_size=page_size)
    pages = cache_like_pages(page_size=page_size, dtype=dtype)
    anchor, refined = decode_both(codec, *pages)
    for got, better, want in zip(anchor, refined, pages, strict=True):
        assert got.shape == better.shape == want.shape
        assert got.dtype == better.dtype == dtype
        spread = (want.float() - want.float().mean(1, keepdim=True)).square().sum().item()
        assert squared_error(got, want) < 0.03 * spread
        # Four more bits reduce the squared error by a factor of 256. bf16 results round to 8 bits.
        assert squared_error(better, want) < squared_error(got, want) / 64


def test_anchor_error_is_at_most_half_an_interval(cache_like_pages, codec_of):
    codec = codec_of()
    k, v = cache_like_pages(num=4)
    for got, want in zip(codec.decode_anchor(codec.encode(k, v).anchor), (k, v), strict=True):
        # Both codecs have 16 codes over a range no wider than the page's, head's or token's.
        span = want.amax((1, 3), keepdim=True) - want.amin((1, 3), keepdim=True)
        assert ((got - want).abs() <= 0.07 * span).all()


def test_pages_are_independent_and_deterministic(codec_of, cache_like_pages):
    codec = codec_of()
    k, v = cache_like_pages(num=5, heads=3)
    together = codec.encode(k, v)
    assert torch.equal(codec.encode(k, v).anchor, together.anchor)
    for n in range(5):
        alone = codec.encode(k[n : n + 1], v[n : n + 1])
        assert torch.equal(alone.anchor[0], together.anchor[n])
        assert torch.equal(alone.residual[0], together.residual[n])
    whole = codec.decode_anchor(together.anchor) + codec.decode_target(*together)
    for head in range(3):
        # A view into a table of records, as a pool gives it.
        part = [records[1:4, head : head + 1] for records in together]
        split = codec.decode_anchor(part[0]) + codec.decode_target(*part)
        for one, all_heads in zip(split, whole, strict=True):
            assert torch.equal(one, all_heads[1:4, :, head : head + 1])


def test_no_pages(codec_of):
    codec = codec_of()
    none = torch.zeros(0, 64, 2, 64)
    encoded = codec.encode(none, none)
    assert encoded.anchor.shape == (0, 2, codec.anchor_bytes)
    for got in codec.decode_anchor(encoded.anchor) + codec.decode_target(*encoded):
        assert got.shape == none.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.375, 96.0, 2.0**-14])
def test_constant_pages_of_bf16_values_are_exact(codec_of, dtype, value):
    page = torch.full((1, 64, 2, 64), value, dtype=dtype)
    anchor, refined = decode_both(codec_of(dtype=dtype), page, page)
    for got in anchor + refined:
        assert torch.equal(got, page)


def test_a_page_of_zeros_is_a_record_of_zeros(codec_of):
    page = torch.zeros(1, 64, 2, 64)
    for records in codec_of().encode(page, page):
        assert not records.any()


def test_constant_pages_of_other_values_are_close(codec_of):
    page = torch.full((1, 64, 2, 64), 1.2345)
    anchor, refined = decode_both(codec_of(), page, page)
    for got in anchor:
        # The precision of the metadata, which is bf16.
        assert (got - page).abs().max() <= 1.2345 * 2**-8
    for got in refined:
        assert (got - page).abs().max() <= 1.2345 * 2**-8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", ["denormal", "huge"])
def test_the_ends_of_the_range_keep_their_size(codec_of, cache_like_pages, dtype, magnitude):
    codec, info = codec_of(dtype=dtype), torch.finfo(dtype)
    k, v = (page / page.abs().max() for page in cache_like_pages())
    size = info.tiny if magnitude == "denormal" else info.max
    if codec.name == "uniform4" and size > 1e38:
        # Ranges wider than fp32 can hold only need to stay finite.
        size /= 2
    pages = [(page.double() * size).to(dtype) for page in (k, v)]
    assert pages[0].isfinite().all()
    for got, want in zip(sum(decode_both(codec, *pages), ()), pages * 2, strict=True):
        assert got.isfinite().all()
        # The metadata has coarse steps at this size, but the order of magnitude is right.
        assert (got.double() - want.double()).abs().max() <= 0.3 * size


def test_whole_range_of_fp32_stays_finite(codec_of):
    page = torch.full((1, 64, 2, 64), torch.finfo(torch.float32).max)
    page[:, ::2] *= -1
    page[:, :, :, ::3] *= 0.5
    for got in sum(decode_both(codec_of(), page, page), ()):
        assert got.isfinite().all()


def test_one_extreme_token_only_hurts_its_own_chunk(codec_of, codec_name):
    """Lynx section 4.1: an outlier inflates the scale of its chunk of its channel alone."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 64, 2, 64)
    k[0, 5, 0, 7] = 1e4
    v[0, 5, 0, 7] = -1e4
    (k_got, v_got), _ = decode_both(codec_of(), k, v)
    k_bad = (k_got - k).abs() > 0.4
    v_bad = (v_got - v).abs() > 0.4
    if codec_name == "log4":
        assert k_bad[0, 32:].sum() == 0
    channel = torch.zeros(64, dtype=torch.bool)
    channel[7] = True
    assert k_bad[..., ~channel].sum() == 0
    if codec_name == "log4":
        assert v_bad[..., ~channel].sum() == 0
    else:
        token = torch.arange(64) == 5
        assert v_bad[:, ~token].sum() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["K", "V"])
def test_debug_mode_refuses_what_it_cannot_represent(codec_of, cache_like_pages, bad, which):
    k, v = cache_like_pages(num=2)
    (k if which == "K" else v)[1, 9, 0, 3] = bad
    with pytest.raises(CodecError, match=rf"{which} pages hold {bad} at .*\[1, 9, 0, 3\]"):
        codec_of(debug=True).encode(k, v)
    exact = codec_of(target="exact")
    back = exact.decode_target(*exact.encode(k, v))
    for got, want in zip(back, (k, v), strict=True):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_spoil_only_their_own_record(codec_of, cache_like_pages, bad):
    k, v = cache_like_pages(num=2)
    clean = codec_of().encode(k, v)
    k[1, 9, 0, 3] = bad
    v[1, 9, 0, 3] = bad
    dirty = codec_of().encode(k, v)
    for got, want in zip(dirty, clean, strict=True):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1, 1], want[1, 1])


def test_malformed_tensors_are_refused(codec_of):
    codec = codec_of()
    page = torch.zeros(1, 64, 2, 64)
    with pytest.raises(CodecError, match=r"K pages must be \[N, 64, heads, 64\]"):
        codec.encode(page[:, :32], page)
    with pytest.raises(CodecError, match=r"V pages must be torch.float32, got torch.bfloat16"):
        codec.encode(page, page.bfloat16())
    with pytest.raises(CodecError, match="must have one shape"):
        codec.encode(page, page[:, :, :1])
    with pytest.raises(CodecError, match="anchor records must be uint8"):
        codec.decode_anchor(torch.zeros(1, 2, codec.anchor_bytes - 1, dtype=torch.uint8))
    anchor = torch.zeros(1, 2, codec.anchor_bytes, dtype=torch.uint8)
    with pytest.raises(CodecError, match="residual records must be uint8"):
        codec.decode_target(anchor, torch.zeros(1, 2, 3, dtype=torch.uint8))


def test_unused_bytes_are_zero(codec_of, cache_like_pages):
    codec = codec_of(head_dim=16, page_size=32)
    anchor, _ = codec.encode(*cache_like_pages(page_size=32, head_dim=16))
    last = codec.anchor_layout.fields[-1]
    assert not anchor[..., last.offset + last.nbytes :].any()
    if codec.name == "log4":
        assert not codec.anchor_layout["unused"].view(anchor).any()
