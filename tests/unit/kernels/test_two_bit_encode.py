"""Encoding into 2-bit anchors against the references, byte by byte."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.formats import FormatError, Log4Settings, Uniform4Settings
from kvspec_testkit.kernels.encoding import assert_same_records, make_pages

CODECS = {"log4": Log4Settings, "uniform4": Uniform4Settings}
by_codec = pytest.mark.parametrize("codec", list(CODECS))


@by_codec
@pytest.mark.parametrize("target", ["int8", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_records_are_those_of_the_reference(codec, target, dtype, device):
    k, v = make_pages(1, 64, 2, 64, dtype)
    assert_same_records(k, v, CODECS[codec].for_page(64, 2), target, device)


@by_codec
@pytest.mark.parametrize(("page_size", "head_dim"), [(32, 96), (96, 32), (160, 64), (64, 128)])
def test_awkward_sizes(codec, page_size, head_dim, device):
    k, v = make_pages(1, page_size, 1, head_dim, torch.bfloat16)
    assert_same_records(k, v, CODECS[codec].for_page(page_size, 2), "int8", device)


@pytest.mark.parametrize(
    "settings",
    [
        Log4Settings(k_chunk=16, v_chunk=32, top=105, anchor_bits=2),
        Uniform4Settings(k_group=16, anchor_bits=2),
    ],
    ids=str,
)
def test_other_settings(settings, device):
    k, v = make_pages(1, 64, 1, 64, torch.bfloat16)
    assert_same_records(k, v, settings, "int8", device)


@by_codec
def test_zeros_and_constants(codec, device):
    k, v = make_pages(1, 64, 1, 64, torch.bfloat16)
    k[..., :8], k[..., 8:16] = -0.0, 1.25
    v[:, :8], v[:, 8:16] = 0.0, -3e38
    assert_same_records(k, v, CODECS[codec].for_page(64, 2), "int8", device)


def test_v_chunks_that_cut_pairs_of_tiles_are_refused(device):
    k, v = make_pages(1, 64, 1, 64, torch.bfloat16)
    settings = Log4Settings(v_chunk=16, anchor_bits=2)
    with pytest.raises(FormatError, match="v_chunk in multiples of 32 for anchor_bits 2, got 16"):
        assert_same_records(k, v, settings, "int8", device)


@pytest.mark.gpu
@by_codec
@pytest.mark.parametrize("target", ["int8", "exact"])
@pytest.mark.parametrize("page_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_all_sizes(codec, target, page_size, head_dim, device):
    k, v = make_pages(3, page_size, 2, head_dim, torch.bfloat16)
    assert_same_records(k, v, CODECS[codec].for_page(page_size, 2), target, device)
