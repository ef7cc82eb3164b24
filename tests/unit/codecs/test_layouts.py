"""Record layouts, their sizes, and the sizes that are refused."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels import formats
from kvspec_kernels.formats import FormatError, Log4Settings, Uniform4Settings
from sglang_kvspec.codecs import make_codec
from sglang_kvspec.core.errors import ConfigError

PAGE_SIZES = [32, 64, 96, 128, 160, 192, 224, 256]
HEAD_DIMS = [16, 32, 64, 80, 96, 128, 256]
SETTINGS = {"log4": Log4Settings, "uniform4": Uniform4Settings}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    ("head_dim", "bits"),
    [(head_dim, 4) for head_dim in HEAD_DIMS] + [(d, 2) for d in HEAD_DIMS if d % 32 == 0],
)
@pytest.mark.parametrize("dtype", formats.EXACT_DTYPES, ids=str)
def test_fields_tile_every_record(codec_name, page_size, head_dim, bits, dtype):
    settings = SETTINGS[codec_name].for_page(page_size, bits)
    layouts = [formats.anchor_layout(settings, page_size, head_dim)]
    layouts += [
        formats.residual_layout(settings, target, page_size, head_dim, dtype)
        for target in ("exact", "int8")
    ]
    for layout in layouts:
        end = 0
        for field in layout.fields:
            assert field.offset == end
            assert field.offset % field.dtype.itemsize == 0
            end += field.nbytes
        assert end <= layout.nbytes < end + formats.RECORD_ALIGNMENT
        assert layout.nbytes % formats.RECORD_ALIGNMENT == 0
    assert layouts[0]["v_codes"].offset % formats.RECORD_ALIGNMENT == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_two_bit_anchors_leave_the_rest_of_their_codes_to_corrections(codec_name, page_size):
    four, two = (SETTINGS[codec_name].for_page(page_size, bits) for bits in (4, 2))
    sizes = (page_size, 96)
    whole, half = (formats.anchor_layout(settings, *sizes) for settings in (four, two))
    saved = page_size * 96 // 4
    assert [field.name for field in half.fields] == [field.name for field in whole.fields]
    for got, want in zip(half.fields, whole.fields, strict=True):
        assert got.dtype == want.dtype
        codes = got.name.endswith("codes")
        assert got.shape == ((saved,) if codes else want.shape)
    corrections = formats.residual_layout(two, "int8", *sizes, torch.float32)
    assert [(field.name, field.shape, field.dtype) for field in corrections.fields] == [
        ("k_codes", (2 * saved,), torch.uint8),
        ("k_rest", (saved,), torch.uint8),
        ("v_codes", (2 * saved,), torch.uint8),
        ("v_rest", (saved,), torch.uint8),
    ]
    raw = [formats.residual_layout(s, "exact", *sizes, torch.float32) for s in (four, two)]
    assert raw[0] == raw[1]


def test_fields_share_memory_with_a_table_of_records():
    layout = formats.anchor_layout(Log4Settings(), 64, 32)
    table = torch.zeros(5, 2, layout.nbytes, dtype=torch.uint8)
    field = layout["v_centre"]
    field.view(table)[3, 1] = 1.0
    expected = torch.zeros_like(table)
    expected[3, 1, field.offset : field.offset + field.nbytes].view(torch.bfloat16).fill_(1.0)
    assert torch.equal(table, expected)
    assert field.view(table).shape == (5, 2, 1, 32)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_log4_anchor_costs_at_most_4_6_bits(head_dim):
    codec = make_codec(
        "log4", target="exact", page_size=64, head_dim=head_dim, dtype=torch.bfloat16
    )
    # The codes; per channel two K chunks and one V chunk, each with a centre (16 bits) and a scale
    # (8); two bases.
    bits = 2 * 64 * head_dim * 4 + 3 * head_dim * (16 + 8) + 2 * 16
    assert bits <= codec.anchor_bytes * 8 < bits + 8 * formats.RECORD_ALIGNMENT
    assert codec.anchor_bits_per_element == codec.anchor_bytes * 8 / (2 * 64 * head_dim)
    assert codec.anchor_bits_per_element <= 4.6


def test_uniform4_anchor_bits():
    codec = make_codec("uniform4", target="exact", page_size=64, head_dim=128, dtype=torch.bfloat16)
    # K: 32 bits of metadata per 64 tokens of a channel; V: 32 per 128 channels of a token.
    assert codec.anchor_bits_per_element == 4 + (32 / 64 + 32 / 128) / 2


@pytest.mark.parametrize("target", ["exact", "int8"])
@pytest.mark.parametrize("page_size", [32, 96, 256])
def test_records_have_the_size_the_layout_says(codec_of, cache_like_pages, target, page_size):
    codec = codec_of(target=target, page_size=page_size)
    pages = cache_like_pages(num=2, page_size=page_size, heads=3)
    anchor, residual = codec.encode(*pages)
    settings = SETTINGS[codec.name].for_page(page_size)
    assert anchor.dtype == residual.dtype == torch.uint8
    assert anchor.shape == (2, 3, formats.anchor_layout(settings, page_size, 64).nbytes)
    assert anchor.shape == (2, 3, codec.anchor_bytes)
    layout = formats.residual_layout(settings, target, page_size, 64, torch.float32)
    assert residual.shape == (2, 3, layout.nbytes) == (2, 3, codec.residual_bytes)


@pytest.mark.parametrize("page_size", [0, 1, 16, 33, 48, 288, 512])
def test_unsupported_page_size_names_the_flag_and_what_is_allowed(codec_of, page_size):
    with pytest.raises(ConfigError, match=rf"--page-size.*32 to 256.*got {page_size}$"):
        codec_of(page_size=page_size)
    with pytest.raises(FormatError, match=f"multiple of 32.*got {page_size}"):
        formats.check_sizes(page_size, 64)


@pytest.mark.parametrize("head_dim", [8, 15, 24, 72, 272])
def test_unsupported_head_size_says_what_is_allowed(codec_of, head_dim):
    with pytest.raises(ConfigError, match=f"head size.*16 to 256.*got {head_dim}"):
        codec_of(head_dim=head_dim)
    with pytest.raises(FormatError, match=f"multiple of 16.*got {head_dim}"):
        formats.residual_layout(Log4Settings(), "int8", 64, head_dim, torch.float32)


def test_other_unsupported_choices(codec_of):
    names = "kivi, kvquant, log4, rotatekv, turboquant, uniform4"
    with pytest.raises(ConfigError, match=f"--kvspec-codec must be one of {names}, got 'x'"):
        make_codec("x", target="exact", page_size=64, head_dim=64, dtype=torch.float32)
    with pytest.raises(ConfigError, match="--kvspec-target must be one of exact, int8"):
        codec_of(target="int4")
    with pytest.raises(ConfigError, match=r"float32, bfloat16, float16, got torch\.float64"):
        codec_of(dtype=torch.float64)


@pytest.mark.parametrize("head_dim", [16, 48, 80])
def test_two_bit_anchors_need_pairs_of_tiles(codec_name, head_dim):
    settings = SETTINGS[codec_name](anchor_bits=2)
    message = f"head size must be a multiple of 32 for anchor_bits 2, got {head_dim}"
    with pytest.raises(FormatError, match=message):
        formats.anchor_layout(settings, 64, head_dim)
    for target in ("int8", "exact"):
        with pytest.raises(FormatError, match=message):
            formats.residual_layout(settings, target, 64, head_dim, torch.float32)


def test_two_bit_anchors_need_the_linear_law(codec_name):
    with pytest.raises(FormatError, match="anchor_bits must be 4 or 2, got 3"):
        SETTINGS[codec_name](anchor_bits=3)
    needs = "anchor_bits 2 needs alpha 0 and levels linear"
    with pytest.raises(FormatError, match=rf"{needs}, got alpha 0.25 and levels linear"):
        Log4Settings(alpha=0.25, anchor_bits=2)
    with pytest.raises(FormatError, match=rf"{needs}, got alpha 0.0 and levels corner"):
        Log4Settings(levels="corner", anchor_bits=2)


def test_chunks_must_divide_the_page():
    with pytest.raises(FormatError, match=r"v_chunk must divide the page size 96.*got 64"):
        formats.anchor_layout(Log4Settings(v_chunk=64), 96, 64)
    with pytest.raises(FormatError, match="top must be an integer from 105 to 120, got 127"):
        Log4Settings(top=127)
    with pytest.raises(FormatError, match="alpha must be at least 0"):
        Log4Settings(alpha=-0.5)
