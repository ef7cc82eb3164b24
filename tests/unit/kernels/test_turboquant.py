"""TurboQuant's encoder against its reference: every byte of its records. Drafts from them are among
the cases of test_draft_attention.py and test_page_selection.py."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.codecs.turboquant import TurboQuantSettings
from kvspec_kernels.formats import FormatError
from kvspec_testkit.kernels.encoding import assert_same_records, encode, make_pages

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(32, 96), (64, 64)])
def test_records_are_those_of_the_reference(bits, dtype, page_size, head_dim, device):
    k, v = make_pages(1, page_size, 2, head_dim, dtype)
    settings = TurboQuantSettings(anchor_bits=bits)
    assert_same_records(k, v, settings, "exact", device, "triton")


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("page_size", "head_dim"), [(32, 16), (96, 80), (64, 128), (256, 16), (32, 256)]
)
def test_awkward_sizes(bits, page_size, head_dim, device):
    k, v = make_pages(1, page_size, 1, head_dim, BF16)
    settings = TurboQuantSettings(anchor_bits=bits)
    assert_same_records(k, v, settings, "exact", device, "triton")


def test_another_rotation(device):
    k, v = make_pages(1, 32, 1, 32, BF16)
    assert_same_records(k, v, TurboQuantSettings(seed=7, anchor_bits=4), "exact", device, "triton")


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_extreme_values(dtype, device):
    info = torch.finfo(dtype)
    k, v = make_pages(6, 32, 1, 32, dtype)
    k[0].zero_()
    k[1] = -k[1].abs() * 0
    # Norms beyond the largest bf16 number are clamped.
    k[2] = torch.where(k[2] > 0, info.max, -info.max)
    k[3] = k[3].sign() * info.smallest_normal / 4
    k[4, :, :, 3] = info.max / 2
    k[5] = 1.0
    settings = TurboQuantSettings(anchor_bits=4)
    assert_same_records(k, v, settings, "exact", device, "triton")
    assert_same_records(v, k, settings, "exact", device, "triton")


def test_no_kernel_encodes_for_the_target_int8(device):
    k, v = make_pages(1, 32, 1, 32, BF16)
    with pytest.raises(FormatError, match="no int8 target"):
        encode(k, v, TurboQuantSettings(), "int8", device, backend="triton")
