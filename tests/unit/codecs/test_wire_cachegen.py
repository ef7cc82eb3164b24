"""cachegen: differences from anchor tokens in bins by layer, and records that are refused."""

from __future__ import annotations

import struct

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.codecs.wire.cachegen import ANCHOR_EVERY, BINS, CacheGenWireCodec
from sglang_kvspec.codecs.wire.delta_record import Coding
from sglang_kvspec.core.errors import CodecError
from sglang_kvspec.kv.geometry import KVGeometry


def codec_of(bins=BINS, **overrides) -> CacheGenWireCodec:
    options = {"num_layers": 6, "num_kv_heads": 2, "head_dim": 16, "page_size": 64}
    geometry = KVGeometry(**(options | {"dtype": torch.float32} | overrides))
    return CacheGenWireCodec(geometry, bins)


def noise(codec, seed=0) -> torch.Tensor:
    """Return pages [2 (K, V), layers, tokens, heads, channels] of noise around channel means. Each
    layer is wider than the one before."""
    g = codec.geometry
    rng = torch.Generator().manual_seed(seed)
    shape = (2, g.num_layers, g.page_size, g.num_kv_heads, g.head_dim)
    means = 3 * torch.randn((2, g.num_layers, 1, g.num_kv_heads, g.head_dim), generator=rng)
    widths = torch.arange(1, g.num_layers + 1).view(1, -1, 1, 1, 1)
    return (torch.randn(shape, generator=rng) * widths + means).to(g.dtype)


def sealed(payload: torch.Tensor) -> torch.Tensor:
    """Write the length and checksum that fit the bytes of `payload` into it, in place."""
    raw = payload.numpy()
    struct.pack_into("<I", raw.data, 8, raw.size)
    struct.pack_into("<Q", raw.data, 0, xxhash.xxh3_64_intdigest(raw.data[8:]))
    return payload


@pytest.fixture(scope="module")
def small():
    return codec_of(num_layers=3, num_kv_heads=1, head_dim=4, page_size=32)


@pytest.fixture(scope="module")
def records(small):
    """One entropy-coded record, and one of symbols as bytes."""
    page = noise(small)
    fine = CacheGenWireCodec(small.geometry, bins=(1e-4, 1e-4, 1e-4))
    return [small.encode(*page), small.encode(*page * 0), fine.encode(*extremes(small))]


def extremes(codec) -> torch.Tensor:
    """Make pages whose differences all have one magnitude, which normal distributions do not
    fit."""
    page = torch.ones_like(noise(codec))
    page[:, :, ::ANCHOR_EVERY] = 0
    page[..., ::2] *= -1
    return page


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [32, 64, 96, 256])
def test_errors_stay_within_half_a_bin(dtype, page_size):
    codec = codec_of(page_size=page_size, dtype=dtype)
    page = noise(codec)
    payload = codec.encode(*page)
    record = codec.format.read(payload)
    assert record.coding is Coding.ENTROPY
    assert payload.numel() < 0.6 * codec.max_page_bytes
    error = (torch.stack(codec.decode(payload)).float() - page.float()).abs()
    rounding = (page.float().abs() + record.step) * torch.finfo(dtype).eps
    is_anchor = torch.arange(page_size) % ANCHOR_EVERY == 0
    assert is_anchor.sum() == -(-page_size // 10)
    excess = error - rounding - 1e-5
    assert (excess[:, :, ~is_anchor] <= record.step / 2).all()
    assert (excess[:, :, is_anchor] <= record.anchor_scale / 2).all()
    # The scale is at most one rounding step above the smallest that keeps the anchor's largest
    # channel in 8 bits.
    largest = page[:, :, is_anchor].float().abs().amax(-1, keepdim=True)
    assert (record.anchor_scale <= largest / 127 * (1 + 2**-7)).all()


def test_bins_are_coarser_in_deeper_thirds():
    codec = codec_of()
    page = noise(codec)
    page[:, 1:] = page[:, :1]
    step = codec.format.read(codec.encode(*page)).step.flatten(1)
    assert torch.allclose(step / step[:, :1], torch.tensor([1.0, 1, 2, 2, 3, 3]))
    delta = page[:, 0] - page[:, 0, torch.arange(64) // 10 * 10]
    others = torch.arange(64) % 10 != 0
    rms = delta[:, others].square().mean((1, 2, 3)).sqrt()
    # Differences are taken from decoded anchor tokens, so the widths agree only approximately.
    assert torch.allclose(step[:, 0], BINS[0] * rms, rtol=1e-2)


def test_tokens_like_their_anchor_cost_next_to_nothing():
    codec = codec_of()
    still = noise(codec)[:, :, :1].expand(-1, -1, 64, -1, -1)
    sizes = [codec.encode(*page).numel() for page in (noise(codec), still)]
    fixed = codec.format.min_bytes
    assert sizes[1] - fixed < (sizes[0] - fixed) / 5
    # Bins are no finer than the rounding of anchor tokens, so that its error is not coded again.
    record = codec.format.read(codec.encode(*still))
    assert torch.allclose(record.step, record.anchor_scale.mean((2, 3, 4), keepdim=True))


def test_a_channel_pays_for_its_own_width():
    """Bins have the layer's width, so channels that hardly change take few bits."""
    codec = codec_of()
    page = noise(codec)
    quiet = page.clone()
    quiet[..., 1:] = quiet[..., 1:] * 0.01
    record = codec.format.read(codec.encode(*quiet))
    classes = torch.from_numpy(record.classes).view(2, 6, 2, 16).int()
    assert (classes[..., :1] > classes[..., 1:] + 5).all()
    by_layer = codec.format.min_bytes
    assert codec.encode(*quiet).numel() - by_layer < (codec.encode(*page).numel() - by_layer) / 3


def test_symbols_that_no_model_fits_are_sent_as_bytes(records, small):
    codec = CacheGenWireCodec(small.geometry, bins=(1e-4, 1e-4, 1e-4))
    assert [small.format.read(r).coding for r in records] == [
        Coding.ENTROPY,
        Coding.ENTROPY,
        Coding.BYTES,
    ]
    assert records[2].numel() == codec.max_page_bytes
    want = extremes(small)
    got = torch.stack(codec.decode(records[2]))
    assert torch.allclose(got, want, atol=1e-5)


def test_a_single_large_difference_is_not_cut_off():
    codec = codec_of(bins=(1e-3, 1e-3, 1e-3))
    page = noise(codec)
    page[0, 2, 5, 1, 3] = 5000.0
    got = codec.decode(codec.encode(*page))[0]
    # A layer's bins are wide enough that 127 on either side cover all its differences.
    assert abs(got[2, 5, 1, 3] - 5000.0) <= 5100 / 254


def test_magnitudes_that_would_overflow_are_refused():
    codec = codec_of()
    page = noise(codec)
    page[1, 3, 7, 1, 2] = 2.0**48
    for got in codec.decode(codec.encode(*page)):
        assert got.isfinite().all()
    page[1, 3, 7, 1, 2] = -(2.0**48) * 1.01
    with pytest.raises(CodecError, match=r"V holds -28\d+\.0 at .*\[3, 7, 1, 2\]"):
        codec.encode(*page)


def test_every_changed_byte_is_noticed(small, records):
    for payload in records:
        for position in range(payload.numel()):
            payload[position] ^= 0x40
            with pytest.raises(CodecError):
                small.decode(payload)
            payload[position] ^= 0x40
        small.decode(payload)


def test_forged_records_are_refused(small, records):
    payload = records[0]

    def forged(position, *new):
        changed = payload.clone()
        changed[position : position + len(new)] = torch.tensor(new, dtype=torch.uint8)
        return sealed(changed)

    nan, infinity, minus_one = (0, 0, 192, 127), (0, 0, 128, 127), (0, 0, 128, 191)
    scale = small.format.layout["anchor_scale"].offset
    for changed, message in [
        (forged(12, 2), "version 1"),
        (forged(14, 7), "coding 0 or 1"),
        (forged(15, 1), "0 as last header field"),
        (forged(16, *nan), "steps must be finite"),
        (forged(16, *infinity), "steps must be finite"),
        (forged(16, *minus_one), "steps must be finite and not negative"),
        (forged(scale, *nan[2:]), "anchor scales must be finite"),
        (forged(14, Coding.BYTES), r"symbols must take \d+ bytes"),
        (sealed(payload[:-1].clone()), "words of 4 bytes"),
        (sealed(payload[:-4].clone()), "words do not hold"),
        (forged(payload.numel() - 4, 0, 0, 0, 0), "must not end in a word of zero"),
    ]:
        with pytest.raises(CodecError, match=message):
            small.decode(changed)


def test_the_widest_forged_scales_decode_to_finite_values(small, records):
    payload = records[0].clone()
    for name in ("step", "anchor_scale"):
        small.format.layout[name].view(payload).fill_(torch.finfo(torch.bfloat16).max)
    # Without the limit, anchor tokens would decode to plus infinity, and differences to infinities
    # of both signs.
    small.format.layout["anchor_codes"].view(payload).fill_(127)
    for got in small.decode(sealed(payload)):
        assert got.isfinite().all()


@given(data=st.data())
def test_hostile_bytes_are_refused_or_harmless(small, records, data):
    """Most cases have a fitting length and checksum, so that they reach the decoder."""
    payload = data.draw(st.sampled_from(records)).clone()
    fixed = small.format.min_bytes
    match data.draw(st.sampled_from(["change", "cut", "body", "all"])):
        case "change":
            positions = st.integers(12, payload.numel() - 1)
            for position, value in data.draw(
                st.lists(st.tuples(positions, st.integers(0, 255)), max_size=8)
            ):
                payload[position] = value
        case "cut":
            payload = payload[: data.draw(st.integers(0, payload.numel()))].clone()
        case "body":
            body = data.draw(st.binary(max_size=small.max_page_bytes - fixed + 8))
            payload = torch.cat((payload[:fixed], torch.tensor(list(body), dtype=torch.uint8)))
        case "all":
            content = data.draw(st.binary(max_size=small.max_page_bytes + 8))
            payload = torch.tensor(list(content), dtype=torch.uint8)
    if payload.numel() >= 16 and data.draw(st.integers(0, 7)):
        sealed(payload)
    try:
        decoded = small.decode(payload)
    except CodecError:
        return
    for got in decoded:
        assert got.shape == (3, 32, 1, 4)
        assert got.isfinite().all()
