"""Kernels over records of a codec that brings its own Triton functions."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.formats import FormatError, anchor_layout, residual_layout
from kvspec_kernels.jit.functions import kernel_function
from kvspec_kernels.ops.encode import encode_pages
from kvspec_testkit.kernels.cases import make_case
from kvspec_testkit.kernels.own_codec import K_MARK, V_MARK, NegatedSettings

SETTINGS = NegatedSettings()


@pytest.mark.parametrize("source", ["anchor", "int8"])
def test_attention_decodes_by_the_function_that_a_codec_names(source, check, device):
    verify = {"q_lens": [2, 3]} if source == "int8" else {}
    check(make_case([70, 128], settings=SETTINGS, source=source, device=device, **verify))


def test_parts_are_encoded_by_the_functions_that_a_codec_names(device):
    k = torch.randn(3, 64, 2, 32, device=device, dtype=torch.bfloat16)
    layout = anchor_layout(SETTINGS, 64, 32)
    residual = residual_layout(SETTINGS, "int8", 64, 32, k.dtype)
    anchors = layout.empty_records((4, 2), device)
    residuals = residual.empty_records((3, 2), device)
    source, slots = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
    places = source.clone()
    encode_pages(k, k, source, anchors, slots, residuals, places, SETTINGS, "int8")
    marked = layout.empty_records((4, 2), device)
    for part, mark in (("k", K_MARK), ("v", V_MARK)):
        layout[f"{part}_codes"].view(marked)[[1, 3], ..., 0] = mark
    assert torch.equal(anchors, marked)
    assert not residuals.any()


@pytest.mark.parametrize("name", ["kvspec_kernels.jit.log4:decode", "nowhere:decode", "decode", ""])
def test_a_function_that_is_not_there_is_refused(name):
    with pytest.raises(FormatError, match=f"Triton function '{name}' cannot be imported"):
        kernel_function(name)
