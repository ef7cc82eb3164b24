"""Tokens are copied to their places in the window, and no other memory is written."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.ops.append import append
from kvspec_kernels.ops.capture import captured_graph

PAGE, HEADS, HEAD_DIM, SLOTS = 32, 2, 16, 4


class Case:
    """A window of random pages, and its content after a reference append."""

    def __init__(self, device, rows, dtype=torch.bfloat16, head_dim=HEAD_DIM, heads=HEADS):
        """rows: (slot, offset) of each token."""
        rng = torch.Generator().manual_seed(0)
        window = torch.randn((2, SLOTS, PAGE, heads, head_dim), generator=rng).to(dtype)
        new = torch.randn((2, len(rows), heads, head_dim), generator=rng).to(dtype)
        # Slices of fused tensors, as projections return them.
        self.k_new, self.v_new = new.transpose(0, 1).contiguous().to(device).unbind(1)
        self.k, self.v = (part.clone().to(device) for part in window)
        self.wanted = window.clone()
        for row, (slot, offset) in enumerate(rows):
            if slot >= 0:
                self.wanted[:, slot, offset] = new[:, row]
        self.slots, self.offsets = (
            torch.tensor(column, device=device) for column in zip(*rows, strict=True)
        )

    def run(self):
        append(self.k_new, self.v_new, self.k, self.v, self.slots, self.offsets)

    def check(self):
        for got, want in zip((self.k, self.v), self.wanted, strict=True):
            assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_tokens_and_padding(index, device):
    case = Case(device, [(2, 5), (-1, 7), (0, PAGE - 1), (3, 0)])
    case.slots, case.offsets = case.slots.to(index), case.offsets.to(index)
    case.run()
    case.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [48, 128])
def test_other_dtypes_and_head_sizes(dtype, head_dim, device):
    case = Case(device, [(1, PAGE - 1)], dtype=dtype, head_dim=head_dim, heads=1)
    case.run()
    case.check()


def test_no_rows(device):
    case = Case(device, [(1, 0)])
    case.k_new, case.v_new = case.k_new[:0], case.v_new[:0]
    case.slots, case.offsets = case.slots[:0], case.offsets[:0]
    before = case.k.clone()
    case.run()
    assert torch.equal(case.k, before)


def test_what_does_not_fit_is_refused(device):
    case = Case(device, [(1, 0)])
    case.k_new = case.k_new.float()
    with pytest.raises(ValueError, match=r"k_new must be torch.bfloat16 \[rows, 2, 16\]"):
        case.run()
    case = Case(device, [(1, 0)])
    case.offsets = case.offsets.repeat(2)
    with pytest.raises(ValueError, match=r"offsets must be contiguous \[1\]"):
        case.run()
    case = Case(device, [(1, 0)] * 2)
    case.v_new = case.v_new.contiguous()
    with pytest.raises(ValueError, match="must have equal shapes and strides"):
        case.run()


@pytest.mark.gpu
def test_replay_in_a_graph_writes_other_rows(device):
    """Capture with nothing to write, and replay with tokens."""
    case = Case(device, [(1, PAGE - 1), (-1, 0), (0, 3)], heads=8, head_dim=128)
    slots = case.slots.clone()
    case.slots.fill_(-1)
    case.run()
    with captured_graph() as graph:
        case.run()
    case.slots.copy_(slots)
    graph.replay()
    case.check()
