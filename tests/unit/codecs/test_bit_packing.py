"""Packing of codes of 1 to 8 bits."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from kvspec_kernels.reference import bit_packing, nibbles


def test_three_bits_lie_one_behind_the_other():
    # 0b001, 0b010, 0b011, ... from the lowest bit on: bytes 0xD1, 0x58, 0x1F.
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0])
    number = sum(code << 3 * i for i, code in enumerate(codes.tolist()))
    want = list(number.to_bytes(3, "little"))
    assert want == [0xD1, 0x58, 0x1F]
    assert bit_packing.pack(codes, 3).tolist() == want


def test_two_and_four_bits_begin_with_the_lowest():
    assert bit_packing.pack(torch.tensor([0, 1, 2, 3]), 2).tolist() == [0b11100100]
    codes = torch.randint(0, 16, (3, 64))
    assert torch.equal(bit_packing.pack(codes, 4), nibbles.pack(codes))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@given(data=st.data())
def test_codes_come_back(bits, data):
    codes = st.integers(0, (1 << bits) - 1)
    rows = data.draw(st.lists(st.lists(codes, min_size=16, max_size=16), min_size=1, max_size=4))
    packed = bit_packing.pack(torch.tensor(rows), bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (len(rows), 2 * bits)
    assert bit_packing.unpack(packed, bits).tolist() == rows
