"""Rotary position embedding by a table, against complex multiplication."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.scorers.rotary import TableRotary


@pytest.mark.parametrize("in_halves", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_channels_turn_by_their_angles(in_halves, rotary_dim):
    rng = torch.Generator().manual_seed(1)
    angles = torch.rand((50, rotary_dim // 2), generator=rng, dtype=torch.float64) * 6
    factor = 1.3
    rotary = TableRotary(torch.cat((angles.cos(), angles.sin()), -1) * factor, in_halves)
    x = torch.randn((7, 3, 16), generator=rng, dtype=torch.float64)
    positions = torch.tensor([0, 49, 3, 3, 8, 21, 1])
    got = rotary.rotate(x, positions)
    for token, position in enumerate(positions.tolist()):
        for pair in range(rotary_dim // 2):
            places = [pair, pair + rotary_dim // 2] if in_halves else [2 * pair, 2 * pair + 1]
            turn = torch.polar(torch.tensor(factor).double(), angles[position, pair])
            wanted = torch.view_as_complex(x[token][:, places].contiguous()) * turn
            torch.testing.assert_close(got[token][:, places], torch.view_as_real(wanted))
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    torch.testing.assert_close(rotary.unrotate(got, positions), x)


def test_positions_beyond_the_table_turn_like_the_last():
    angles = torch.rand((9, 8), generator=torch.Generator().manual_seed(2))
    rotary = TableRotary(torch.cat((angles.cos(), angles.sin()), -1), in_halves=True)
    x = torch.ones((2, 1, 16))
    far, last = rotary.rotate(x, torch.tensor([8, 500]))
    assert torch.equal(far, last)
