"""Weights in 4 bits: errors, sizes, and what each way of rounding is better at."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvspec_kernels.reference import int4_weights
from kvspec_kernels.reference.int4_weights import GROUP, decode, half_quadratic, round_to_nearest

# bf16 has 8 significant bits, so a zero moves by at most 2^-9 of its size.
BF16_ERROR = 2.0**-8


def weight_of(rows: int, inputs: int) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("inputs", [GROUP, 4 * GROUP, 100, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_at_most_half_a_step(inputs: int, dtype: torch.dtype) -> None:
    weight = weight_of(8, inputs).to(dtype)
    encoded = round_to_nearest(weight)
    assert encoded.codes.dtype == torch.uint8
    error = (decode(encoded) - weight.float()).abs()
    for group, part in enumerate(error.split(GROUP, dim=1)):
        own = weight[:, group * GROUP : (group + 1) * GROUP].float()
        step = (own.amax(1) - own.amin(1)) / 15
        # Rounding of scale and zero moves the ends of the range, too.
        moved = BF16_ERROR * (15 * step + own.abs().amax(1))
        assert bool((part <= (step / 2 + moved)[:, None]).all())


def test_a_weight_takes_four_and_a_half_bits() -> None:
    encoded = round_to_nearest(weight_of(16, 4 * GROUP))
    assert encoded.nbytes * 8 == 16 * 4 * GROUP * 4.5


def test_equal_weights_come_back() -> None:
    weight = torch.full((3, GROUP), 0.5)
    moment = torch.eye(GROUP)
    for encoded in (
        round_to_nearest(weight),
        half_quadratic(weight),
        int4_weights.compensated(weight, moment),
    ):
        assert torch.equal(decode(encoded), weight)


def test_products_use_what_codes_stand_for() -> None:
    encoded = round_to_nearest(weight_of(8, 100))
    x, bias = torch.randn(2, 3, 100), torch.randn(8)
    out = int4_weights.product(x, encoded, bias)
    assert torch.equal(out, F.linear(x, decode(encoded), bias))
    assert int4_weights.product(x.bfloat16(), encoded).dtype == torch.bfloat16


def test_half_quadratic_gives_up_outliers() -> None:
    weight = weight_of(64, 4 * GROUP)
    weight[:, ::GROUP] *= 10
    errors = [decode(encode(weight)) - weight for encode in (half_quadratic, round_to_nearest)]
    ours, nearest = (error.abs().pow(int4_weights.NORM).mean() for error in errors)
    assert ours < nearest


@pytest.mark.parametrize("inputs", [2 * GROUP, 100])
def test_compensation_lowers_errors_of_outputs(inputs: int) -> None:
    weight = weight_of(32, inputs)
    # Inputs of which some are nearly the same.
    x = torch.randn(1000, 16) @ torch.randn(16, inputs) + 0.1 * torch.randn(1000, inputs)
    outputs = x @ weight.t()
    errors = [
        ((x @ decode(encoded).t()) - outputs).norm() / outputs.norm()
        for encoded in (int4_weights.compensated(weight, x.t() @ x), round_to_nearest(weight))
    ]
    assert errors[0] < 0.5 * errors[1]


def test_independent_inputs_need_no_compensation() -> None:
    weight = weight_of(8, 100)
    encoded = int4_weights.compensated(weight, torch.eye(100))
    assert torch.equal(decode(encoded), decode(round_to_nearest(weight)))


def test_the_factor_is_that_of_the_inverse_moment() -> None:
    x = torch.randn(300, 100) * torch.linspace(0.1, 3, 100)
    moment = x.t() @ x
    factor = int4_weights.compensation(moment).double()
    damping = int4_weights.DAMPINGS[0] * moment.double().diagonal().mean()
    inverse = torch.linalg.inv(moment.double() + damping * torch.eye(100).double())
    assert torch.equal(factor, factor.triu())
    assert bool((factor.diagonal() > 0).all())
    # fp32 has 24 bits; the moment's largest eigenvalue is about 1000 times its least one.
    torch.testing.assert_close(factor.t() @ factor, inverse, rtol=1e-4, atol=1e-7)


def test_blocks_are_rounded_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block and its last group are not whole. Some inputs are a hundred times as large as
    others."""
    inputs = 5 * GROUP + 10
    x = torch.randn(2000, 16) @ torch.randn(16, inputs) + 0.1 * torch.randn(2000, inputs)
    x[:, ::50] *= 100
    weight, moment = weight_of(32, inputs), x.t() @ x
    assert inputs < int4_weights.BLOCK
    whole = int4_weights.compensated(weight, moment)
    for groups in (1, 2, 4):
        monkeypatch.setattr(int4_weights, "BLOCK", groups * GROUP)
        parts = int4_weights.compensated(weight, moment)
        assert (parts.codes == whole.codes).float().mean() > 0.999
        ours, one = (decode(encoded) - weight for encoded in (parts, whole))
        # The error of outputs.
        costs = [float((error @ moment * error).sum()) for error in (ours, one)]
        assert costs[0] == pytest.approx(costs[1], rel=1e-3)


def test_errors_move_to_later_blocks_as_the_moment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The change of a block's weights that makes up best for errors of earlier inputs, if weights
    of the block and later ones may take any value."""
    monkeypatch.setattr(int4_weights, "BLOCK", GROUP)
    x = torch.randn(1000, 3 * GROUP) * torch.linspace(0.1, 3, 3 * GROUP)
    moment = x.t() @ x
    factor = int4_weights.compensation(moment).double()
    damping = int4_weights.DAMPINGS[0] * moment.double().diagonal().mean()
    damped = moment.double() + damping * torch.eye(3 * GROUP).double()
    for begin in (GROUP, 2 * GROUP):
        best = torch.linalg.solve(damped[begin:, begin:], damped[begin:, :begin]).t()
        found = factor[:begin, begin : begin + GROUP]
        torch.testing.assert_close(found, best[:, :GROUP], rtol=1e-3, atol=1e-4)


def test_a_moment_that_cannot_be_inverted_is_damped_more(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 100)
    moment = x.t() @ x
    factor = int4_weights.compensation(moment)
    assert factor.is_contiguous()
    # Negative damping stands for digits that fp32 lacks.
    monkeypatch.setattr(int4_weights, "DAMPINGS", (-2.0, 0.01))
    assert torch.equal(int4_weights.compensation(moment), factor)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_moments_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        int4_weights.compensation(torch.full((GROUP, GROUP), value))


def test_inputs_that_were_never_seen_do_no_harm() -> None:
    weight = weight_of(8, GROUP)
    torch.set_flush_denormal(True)
    try:
        encoded = int4_weights.compensated(weight, torch.zeros(GROUP, GROUP))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(decode(encoded), decode(round_to_nearest(weight)))
