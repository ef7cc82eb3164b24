"""Moments of inputs by tensor cores, which hold each input exactly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters.self_calibration import InputMoment

DEVICE = torch.device("cuda:0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moments_of_16_bits_err_like_sums_of_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    method = SimpleNamespace(apply=lambda layer, x, bias: x)
    measured = InputMoment(method, 1000, DEVICE)
    texts = torch.randn(16, 512, 1000, device=DEVICE).to(dtype)
    # Some inputs of large models are a hundred times as large as others.
    texts[:, :, :4] *= 100
    for text in texts:
        measured.apply(None, text)
    rows = texts.flatten(0, 1).double()
    exact = rows.t() @ rows
    sizes = exact.diagonal().sqrt()
    # Compensation adds 1e-2 to the diagonal.
    error = ((measured.moment.double() - exact) / torch.outer(sizes, sizes)).abs().max()
    assert float(error) < 1e-4
