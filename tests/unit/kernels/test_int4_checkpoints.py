"""Weights of GPTQ and AWQ checkpoints stand for the same values here."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.reference.int4_checkpoints import AWQ_ORDER, from_awq, from_gptq, stacked
from kvspec_kernels.reference.int4_weights import decode

INPUTS, COLUMNS = 256, 16


def draw(group):
    """Return codes [K, N], zeros and scales [K / group, N], and the values [N, K]. Scales are
    powers of two, which bf16 holds exactly."""
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (INPUTS, COLUMNS), generator=rng)
    zeros = torch.randint(1, 16, (INPUTS // group, COLUMNS), generator=rng)
    scales = 2.0 ** torch.randint(-8, 0, (INPUTS // group, COLUMNS), generator=rng)
    each = (part.repeat_interleave(group, 0) for part in (zeros, scales))
    zero, scale = each
    return codes, zeros, scales.half(), ((codes - zero) * scale).t()


def words(nibbles):
    """Return int32 words of nibbles [..., 8], the first in the lowest bits."""
    total = sum(nibbles[..., place].long() << 4 * place for place in range(8))
    return torch.where(total < 2**31, total, total - 2**32).to(torch.int32)


def in_gptq(codes, zeros):
    return words(codes.view(-1, 8, COLUMNS).transpose(1, 2)), words(zeros.view(len(zeros), -1, 8))


def in_awq(codes, zeros):
    return [words(part.view(len(part), -1, 8)[..., list(AWQ_ORDER)]) for part in (codes, zeros)]


@pytest.mark.parametrize("group", [64, 128, 256])
@pytest.mark.parametrize("zero_is_less", [True, False])
def test_gptq(group, zero_is_less):
    codes, zeros, scales, values = draw(group)
    qweight, qzeros = in_gptq(codes, zeros - int(zero_is_less))
    weight = from_gptq(qweight, qzeros, scales, zero_is_less=zero_is_less)
    assert torch.equal(decode(weight), values)


@pytest.mark.parametrize("group", [64, 128, 256])
def test_awq(group):
    codes, zeros, scales, values = draw(group)
    assert torch.equal(decode(from_awq(*in_awq(codes, zeros), scales)), values)


def test_weights_are_stacked_in_order():
    codes, zeros, scales, values = draw(64)
    weight = from_awq(*in_awq(codes, zeros), scales)
    other = from_awq(*in_awq(15 - codes, zeros), scales)
    both = decode(stacked([weight, other]))
    assert torch.equal(both[:COLUMNS], values)
    assert torch.equal(both[COLUMNS:], decode(other))


def test_formats_that_do_not_fit_are_refused():
    codes, zeros, scales, _ = draw(32)
    qweight, qzeros = in_awq(codes, zeros)
    with pytest.raises(ValueError, match="groups of 32 inputs"):
        from_awq(qweight, qzeros, scales)
    with pytest.raises(ValueError, match="do not fit"):
        from_awq(qweight, qzeros, scales[1:])
    with pytest.raises(ValueError, match="do not fit"):
        from_awq(qweight[:, 1:], qzeros, scales)
