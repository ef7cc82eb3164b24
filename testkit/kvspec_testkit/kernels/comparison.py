"""Assertions on results of the attention kernels: their errors relative to those of torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kvspec_testkit.kernels.cases import AttentionCase


def largest(errors: torch.Tensor) -> torch.Tensor:
    return errors.abs().max()


def rms(errors: torch.Tensor) -> torch.Tensor:
    """Return the root mean square, for few values: the largest of 10 varies more than twofold."""
    return errors.double().square().mean().sqrt()


def assert_attention(
    case: AttentionCase,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    sm_scale: float | None = None,
    factor: float = 2.0,
    baseline: torch.dtype | None = None,
    weights: torch.dtype = torch.float32,
) -> None:
    """Assert that errors of out and lse against the fp32 reference are at most `factor` times those
    of the same computation in torch in `baseline` (AttentionCase.baseline), plus a floor.

    baseline: the dtype of q unless given. For q in fp32 the reference is in fp64. weights: the
    dtype in which weights are summed.

    Floor of out, relative to the largest output: half a unit in the last place of its dtype, plus
    half a unit of fp32 times the largest lse. The first is for the final rounding, which may happen
    to be exact in the baseline. The second is there because a weight is 2 to the power of a number
    of that size, and inherits its absolute error. Floor of lse: 16 units in the last place of fp32,
    plus the effect of half a unit of `weights` on a logarithm. The 16 units are for the order of
    summation, and for exp2 and log2 of a GPU, which err by 2 units each.
    """
    dtype = case.q.dtype
    finer = torch.float64 if dtype == torch.float32 else torch.float32
    exact_out, exact_lse = case.reference(finer, sm_scale)
    base_out, base_lse = case.baseline(baseline or dtype, sm_scale)
    largest_out = exact_out.abs().max().item()
    finite_lse = exact_lse[exact_lse.isfinite()].abs()
    largest_lse = max(1.0, finite_lse.max().item()) if len(finite_lse) else 1.0
    fp32_eps = torch.finfo(torch.float32).eps
    floor = (torch.finfo(dtype).eps + fp32_eps * largest_lse) / 2 * largest_out
    assert_within_reference(
        out, exact_out, base_out, rows=case.qo_indptr, floor=floor, factor=factor
    )
    floor = 16 * fp32_eps * largest_lse + math.log2(math.e) * torch.finfo(weights).eps / 2
    everything = torch.tensor([0, len(lse)])
    assert_within_reference(
        lse, exact_lse, base_lse, rows=everything, floor=floor, factor=factor, norm=rms
    )


def assert_within_reference(
    actual: torch.Tensor,
    exact: torch.Tensor,
    baseline: torch.Tensor,
    *,
    rows: torch.Tensor,
    floor: float,
    factor: float = 2.0,
    norm: Callable[[torch.Tensor], torch.Tensor] = largest,
) -> None:
    """Assert that the error of `actual` in every group of rows is at most `factor` times that of
    `baseline`, plus `floor`. norm: measure of errors. Tensors are [num_rows, ...]. rows: bounds of
    the groups, as in qo_indptr. Infinities must be equal, and no value of `actual` may be NaN."""
    assert actual.shape == exact.shape == baseline.shape
    actual, exact, baseline = actual.float(), exact.float(), baseline.float()
    assert not actual.isnan().any(), "the result has NaNs"
    assert torch.equal(actual.isinf(), exact.isinf()), (
        "the result has infinities at other places than the reference"
    )
    finite = ~exact.isinf()
    assert torch.equal(actual[~finite], exact[~finite]), (
        "infinities of the result have other signs than the reference"
    )
    for group, (begin, end) in enumerate(zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True)):
        inside = finite[begin:end]
        if not inside.any():
            continue
        error, allowed = (
            norm((values[begin:end] - exact[begin:end])[inside]).item()
            for values in (actual, baseline)
        )
        limit = factor * allowed + floor
        assert error <= limit, (
            f"rows {begin} to {end} (group {group}): error {error:.3g}, allowed {limit:.3g} = "
            f"{factor} * {allowed:.3g} of the baseline + {floor:.3g}"
        )
