"""Rounding of a group by the kernel: as the reference rounds it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvspec_kernels.ops import int4_rounding
from kvspec_kernels.reference import int4_weights
from kvspec_kernels.reference.int4_weights import GROUP, compensated_by, compensation, decode

# Rows and inputs: less than a block and a group, whole ones, ends inside each.
SHAPES = [(5, 24), (16, GROUP), (40, 100), (33, 3 * GROUP)]


def draw(num_rows, num_inputs, device):
    """Return a weight, and inputs of which some are nearly the same."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=rng)

    x = normal(500, 12) @ normal(12, num_inputs) + 0.1 * normal(500, num_inputs)
    return normal(num_rows, num_inputs).to(device), x.to(device)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Allocate results as NaN or 255, so that none is read before it is written."""
    plain = torch.Tensor.new_empty

    def new_filled(tensor, *size, **options):
        empty = plain(tensor, *size, **options)
        return empty.fill_(float("nan") if empty.is_floating_point() else 255)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_filled)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_group_equals_the_reference(shape, device):
    """No operation of a group is a sum of several terms, so all values are equal."""
    weight, x = draw(*shape, device)
    factor = compensation(x.t() @ x)[:GROUP, :GROUP]
    left = weight[:, :GROUP]
    found = int4_rounding.round_group(left.clone(), factor)
    expected = int4_weights.round_group(left.clone(), factor)
    for name, ours, theirs in zip(found._fields, found, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_err_as_little_as_with_the_reference(shape, device):
    weight, x = draw(*shape, device)
    factor = compensation(x.t() @ x)
    ours = compensated_by(weight, factor, int4_rounding.round_group)
    theirs = compensated_by(weight, factor)
    assert (ours.codes == theirs.codes).float().mean() > 0.99
    outputs = x @ weight.t()
    errors = [
        ((x @ decode(encoded).t()) - outputs).norm() / outputs.norm()
        for encoded in (ours, theirs, int4_weights.round_to_nearest(weight))
    ]
    assert errors[0] <= 1.01 * errors[1]
    assert errors[0] < 0.7 * errors[2]


def test_views_are_rounded_where_they_lie(device):
    weight, x = draw(20, 2 * GROUP, device)
    factor = compensation(x.t() @ x)
    left, part = weight[:, GROUP:], factor[GROUP:, GROUP:]
    assert not left.is_contiguous()
    found = int4_rounding.round_group(left, part)
    expected = int4_rounding.round_group(left.contiguous(), part.contiguous())
    assert all(map(torch.equal, found, expected))


def test_equal_weights_have_no_error(device):
    left = torch.full((3, GROUP), 0.5, device=device)
    found = int4_rounding.round_group(left, torch.eye(GROUP, device=device))
    assert not found.codes.any()
    assert not found.errors.any()
    assert bool((found.zero == 0.5).all())


def test_no_rows(device):
    found = int4_rounding.round_group(torch.zeros(0, 8, device=device), torch.eye(8, device=device))
    assert found.codes.shape == (0, 8)


def test_groups_that_do_not_fit_are_refused():
    round_group, eye = int4_rounding.round_group, torch.eye(8)
    left = torch.zeros(3, 8)
    for message, call in (
        ("must be fp32", partial(round_group, left.half(), eye)),
        (r"left \[3, 65\]", partial(round_group, torch.zeros(3, 65), torch.eye(65))),
        (r"factor \[8, 8\]", partial(round_group, left[:, 1:], eye)),
        ("contiguous", partial(round_group, torch.zeros(8, 3).t(), eye)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
