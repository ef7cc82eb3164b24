"""The replay window, compared with the set of all sequence numbers read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.transport.frames import ACK_SPAN
from sglang_kvspec.transport.replay import ReplayWindow


@given(st.lists(st.integers(0, 3000), max_size=200))
def test_a_sequence_is_new_once_and_while_it_can_be_told(sequences: list[int]) -> None:
    window, seen, highest = ReplayWindow(), set[int](), 0
    for sequence in sequences:
        is_new = sequence >= 1 and sequence not in seen and sequence > highest - ACK_SPAN
        assert window.admit(sequence) == is_new
        if is_new:
            seen.add(sequence)
            highest = max(highest, sequence)
    bits = int.from_bytes(window.bitmap(), "little")
    told = {window.highest - i for i in range(ACK_SPAN) if bits >> i & 1}
    assert window.highest == highest
    assert told == {sequence for sequence in seen if sequence > highest - ACK_SPAN}
    assert len(window.bitmap()) <= ACK_SPAN // 8


def test_a_jump_far_ahead_costs_nothing() -> None:
    window = ReplayWindow()
    assert window.admit((1 << 63) - 1)
    assert not window.admit(1)
    assert len(window.bitmap()) == 1
