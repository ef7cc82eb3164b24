"""Byte counts computed without torch, compared with the layouts that kernels use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.record_bytes import page_bytes_of

SHAPE = ModelShape(
    num_layers=3, num_heads=8, num_kv_heads=2, head_dim=128, dense_params=1, embed_params=0
)
DTYPES = {2: torch.bfloat16, 4: torch.float32}


NO_INT8 = ["kivi", "kvquant", "rotatekv", "turboquant"]


@pytest.mark.parametrize(
    ("codec", "target"),
    [(codec, target) for codec in ("log4", "uniform4") for target in ("exact", "int8")]
    + [(codec, "exact") for codec in NO_INT8],
)
@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_bytes_are_those_of_the_layouts(codec, target, dtype_bytes):
    for page_size in (32, 64, 96, 128, 256):
        for head_dim in (16, 48, 80, 128, 256):
            shape = replace(SHAPE, head_dim=head_dim, kv_dtype_bytes=dtype_bytes)
            layouts = make_codec(
                codec,
                target=target,
                page_size=page_size,
                head_dim=head_dim,
                dtype=DTYPES[dtype_bytes],
            )
            page = page_bytes_of(shape, codec, target, page_size)
            assert page.anchor == 6 * layouts.anchor_bytes
            assert page.residual == 6 * layouts.residual_bytes
            assert page.plain == page_size * shape.kv_bytes_per_token


@pytest.mark.parametrize(("dtype", "mantissa_bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_bytes_of_packed_pages_are_those_of_the_layout(dtype, mantissa_bits):
    for page_size in (32, 64, 96, 256):
        for head_dim in (16, 48, 128):
            shape = replace(SHAPE, head_dim=head_dim, kv_mantissa_bits=mantissa_bits)
            sizes = {"page_size": page_size, "head_dim": head_dim, "dtype": dtype}
            packed = make_codec("uniform4", target="exact", packs=True, **sizes).packed
            page = page_bytes_of(shape, "uniform4", "exact", page_size, "packed")
            # One of six records may not fit.
            assert page.stored == 6 * packed.record_bytes + packed.raw_v_bytes
            assert page_bytes_of(shape, "uniform4", "exact", page_size).stored == page.residual


@pytest.mark.parametrize(
    ("codec", "target", "dtype_bytes"),
    [("log4", "exact", 2), ("uniform4", "int8", 2), ("uniform4", "exact", 4)],
)
def test_other_residuals_have_no_packed_form(codec, target, dtype_bytes):
    with pytest.raises(ConfigError, match=r"^--exact-residual packed needs --target exact"):
        page_bytes_of(replace(SHAPE, kv_dtype_bytes=dtype_bytes), codec, target, 64, "packed")


@pytest.mark.parametrize("codec", NO_INT8)
def test_a_codec_without_corrections_has_no_int8_plan(codec):
    message = rf"^--kvspec-codec {codec}: the codec {codec} has no int8 target \(allowed: "
    with pytest.raises(ConfigError, match=message):
        page_bytes_of(SHAPE, codec, "int8", 64)


@pytest.mark.parametrize("page_size", [0, 16, 33, 288])
def test_page_sizes_without_a_layout_are_refused(page_size):
    with pytest.raises(ConfigError, match="--page-size"):
        page_bytes_of(SHAPE, "uniform4", "exact", page_size)


@pytest.mark.parametrize("head_dim", [8, 100, 512])
def test_head_sizes_without_a_layout_are_refused(head_dim):
    with pytest.raises(ConfigError, match="head sizes"):
        page_bytes_of(replace(SHAPE, head_dim=head_dim), "uniform4", "exact", 64)
