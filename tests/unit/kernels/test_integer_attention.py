"""Attention on integer codes, against attention over the decoded pages."""

from __future__ import annotations

import math

import pytest
import torch

from kvspec_kernels.formats import Log4Settings, Uniform4Settings, anchor_layout
from kvspec_kernels.reference import integer_attention
from kvspec_testkit.kernels.cases import make_case

SETTINGS = [
    Uniform4Settings(),
    Uniform4Settings(k_group=32),
    Uniform4Settings(anchor_bits=2),
    Log4Settings(anchor_bits=2),
    Log4Settings(v_chunk=32, anchor_bits=2),
]
RELATIVE_ERROR = 1e-2
# Scores of these cases are below this value, and a lse has the same relative error.
LARGEST_SCORE = 30


def errors_of(settings, length, group, head_dim=128, page_size=64):
    """Return the relative error of out and the largest absolute error of lse."""
    case = make_case(
        [length],
        settings=settings,
        source="anchor",
        page_size=page_size,
        head_dim=head_dim,
        group=group,
    )
    layout = anchor_layout(settings, page_size, head_dim)
    scale = 1 / math.sqrt(head_dim)
    records = case.anchors[case.indices.long()]
    out, lse = integer_attention.attend(case.q[0], records, length, settings, layout, scale)
    exact_out, exact_lse = case.reference(torch.float32)
    relative = (out - exact_out[0]).norm() / exact_out[0].norm()
    return relative.item(), (lse - exact_lse[0]).abs().max().item()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 700])
@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
def test_agrees_with_decoded_pages(settings, length):
    relative, absolute = errors_of(settings, length, group=4)
    assert relative <= RELATIVE_ERROR
    assert absolute <= RELATIVE_ERROR * LARGEST_SCORE


@pytest.mark.parametrize(("group", "head_dim", "page_size"), [(1, 96, 32), (16, 64, 128)])
def test_other_shapes(group, head_dim, page_size):
    settings = Uniform4Settings.for_page(page_size)
    relative, _ = errors_of(settings, 300, group, head_dim, page_size)
    assert relative <= RELATIVE_ERROR


def test_eight_bits_alone_are_not_enough(monkeypatch):
    """Shows why a second integer refines each operand."""
    monkeypatch.setattr(integer_attention, "FINER", 1)
    relative, _ = errors_of(Uniform4Settings(), 700, group=4)
    assert relative > RELATIVE_ERROR


def test_rounding_is_relative_to_the_largest():
    values = torch.tensor([[3.0, -127.4, 0.01], [0.0, 0.0, 0.0]], dtype=torch.float64)
    steps = integer_attention.rounded(values, (-1,))
    assert torch.equal(steps[0], torch.tensor([3.0, -127.375, 0.0], dtype=torch.float64))
    assert torch.equal(steps[1], values[1])
