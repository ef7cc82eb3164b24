"""Kernels' divisions without a division, compared with those of torch on the CPU."""

from __future__ import annotations

import pytest
import torch

from kvspec_testkit.kernels.division import divide_kernel

BLOCK = 1 << 13


def check(values: torch.Tensor, scales: torch.Tensor, device: torch.device) -> None:
    """Check quotients of fp32 values by scales of at most 8 significant bits, both [n * BLOCK]."""
    inputs = [tensor.contiguous().to(device) for tensor in (values, scales)]
    outputs = [torch.full_like(inputs[0], torch.nan) for _ in range(3)]
    grid = (len(values) // BLOCK,)
    divide_kernel[grid](*inputs, *outputs, BLOCK=BLOCK, enable_fp_fusion=False)
    ratio, clamped, fifteenth = (output.cpu() for output in outputs)
    exact = values / scales
    relevant = exact.abs() >= 2.0**-20
    assert torch.equal(ratio[relevant], exact[relevant])
    assert torch.equal(clamped[relevant], exact.clamp(0, 1)[relevant])
    assert torch.equal(fifteenth, values / 15)


def significands() -> torch.Tensor:
    """Return all numbers of 8 bits in [1, 2)."""
    return 1 + torch.arange(128) / 128


def test_every_divisor_with_random_numerators(device):
    rng = torch.Generator().manual_seed(0)
    values = 1 + torch.randint(1 << 23, (128, BLOCK // 64), generator=rng) / 2**23
    scales = significands()[:, None].expand_as(values)
    check(values.flatten(), scales.flatten(), device)


def test_exponents(device):
    """Scales range from the smallest to the largest of a record. Values lie around them."""
    rng = torch.Generator().manual_seed(1)
    exponents = torch.linspace(-130, 127, 512).round().double()
    scales = significands().repeat(BLOCK // 128).double()
    scales = (scales * 2 ** exponents.repeat(BLOCK // 512).sort().values).float()
    # Scales below 2^-126 have lost bits, which bf16 would lose, too.
    scales = scales.bfloat16().float().clamp_max(torch.finfo(torch.bfloat16).max)
    ratios = 2 * torch.rand(BLOCK, generator=rng).double() - 1
    check((ratios * scales.double()).float(), scales, device)


@pytest.mark.gpu
def test_every_divisor_with_every_numerator(device):
    numerators = 1 + torch.arange(1 << 23) / 2**23
    for scale in significands():
        check(numerators, scale.expand_as(numerators), device)
