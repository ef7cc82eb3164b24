"""Packing of 4-bit codes."""

from __future__ import annotations

import torch

from kvspec_kernels.reference import nibbles

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def test_low_nibble_is_the_first_channel():
    assert nibbles.pack(torch.tensor([1, 2, 3, 4])).tolist() == [0x21, 0x43]
    assert nibbles.pack(torch.tensor([-1, 0])).tolist() == [0x0F]


def test_every_byte_round_trips():
    unsigned, signed = nibbles.unpack(ALL_BYTES), nibbles.unpack_signed(ALL_BYTES)
    assert unsigned.tolist()[:4] == [0, 0, 1, 0]
    assert torch.equal(nibbles.pack(unsigned), ALL_BYTES)
    assert torch.equal(nibbles.pack(signed), ALL_BYTES)
    assert signed.min() == -8
    assert signed.max() == 7
    assert torch.equal(signed.int() & 15, unsigned.int())


def test_look_up_decodes_both_nibbles():
    values = torch.arange(16) * 1.5 - 3
    got = nibbles.look_up(nibbles.pair_table(values), ALL_BYTES.view(4, 64))
    assert torch.equal(got, values[nibbles.unpack(ALL_BYTES).long()].view(4, 128))
