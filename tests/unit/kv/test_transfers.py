"""Values in memory that a device reads later are not overwritten before the read."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.kv.transfers import (
    Stage,
    fields_to_device,
    received_together,
    send_into,
    to_device,
)

CPU = torch.device("cpu")
NUM_WORDS = 32


@dataclass(eq=False)
class Reading:
    """Pending reads of one stream of a device."""

    device: LateDevice
    parts: list[tuple[torch.Tensor, torch.Tensor]]
    stream: int
    is_over: bool = False

    def query(self):
        return self.is_over

    def synchronize(self):
        self.device.waits += not self.is_over
        while not self.is_over:
            self.device.step(self.stream)


class LateDevice:
    """Device of several streams, each of which works in order. Reads go to the streams in turn."""

    def __init__(self, num_streams=1):
        self.queue, self.waits = [], 0
        self.num_streams, self.num_reads = num_streams, 0

    def read(self, parts):
        assert all(target.nbytes == words.nbytes for target, words in parts)
        self.queue.append(Reading(self, parts, self.num_reads % self.num_streams))
        self.num_reads += 1
        return self.queue[-1]

    def step(self, stream=None):
        """Run the next read of this stream, or the oldest read of all streams."""
        reading = next((r for r in self.queue if stream in (None, r.stream)), None)
        if reading is None:
            return
        self.queue.remove(reading)
        for target, words in reading.parts:
            target.view(torch.int32).copy_(words)
        reading.is_over = True


# Words of tensors that are sent together, possibly none, and the number of steps of the device
# afterwards.
SENDS = st.tuples(st.lists(st.integers(0, NUM_WORDS // 3), max_size=3), st.integers(0, 3))


@given(st.lists(SENDS, max_size=60), st.randoms())
@settings(max_examples=300, deadline=None)
def test_every_target_gets_its_values(sends, rng):
    check(sends, rng)


@given(st.lists(SENDS, max_size=60), st.randoms())
@settings(max_examples=300, deadline=None)
def test_every_target_of_two_streams_gets_its_values(sends, rng):
    check(sends, rng, num_streams=2)


def check(sends, rng, num_streams=1):
    device = LateDevice(num_streams)
    stage = Stage(torch.zeros(NUM_WORDS, dtype=torch.int32), device.read)
    sent = []
    for counts, num_steps in sends:
        values = [torch.tensor([rng.randrange(1 << 30) for _ in range(n)]).int() for n in counts]
        targets = [torch.zeros(count, dtype=torch.int32) for count in counts]
        stage.send(list(zip(targets, values, strict=True)))
        sent += zip(targets, values, strict=True)
        for _ in range(num_steps):
            device.step(rng.randrange(num_streams))
    while device.queue:
        device.step()
    assert all(torch.equal(*pair) for pair in sent)


def test_a_send_does_not_wait_while_there_is_room():
    device = LateDevice()
    stage = Stage(torch.zeros(NUM_WORDS, dtype=torch.int32), device.read)
    for number in range(100):
        stage.send([(torch.zeros(10, dtype=torch.int32), torch.full((10,), number).int())])
        if number >= 2:
            device.step()
    assert device.waits == 0
    # Two sends are still unread, and the memory holds three.
    for _ in range(2):
        stage.send([(torch.zeros(10, dtype=torch.int32), torch.zeros(10).int())])
    assert device.waits == 1


def test_the_test_would_see_values_that_are_overwritten(monkeypatch):
    monkeypatch.setattr(Stage, "_take", lambda stage, num_words: (0, num_words))
    with pytest.raises(AssertionError):
        test_every_target_gets_its_values.hypothesis.inner_test(
            [([3], 0), ([3], 0)], random.Random(0)
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_bytes_that_are_no_whole_words(dtype):
    device = LateDevice()
    stage = Stage(torch.zeros(NUM_WORDS, dtype=torch.int32), device.read)
    values = torch.tensor([[1, 0, 1], [1, 1, 0]]).to(dtype)
    words = torch.zeros(-(-values.nbytes // 4), dtype=torch.int32)
    stage.send([(words, values)])
    device.step()
    found = words.view(torch.uint8)[: values.nbytes].view(dtype).view(values.shape)
    assert torch.equal(found, values)


def test_on_a_cpu_values_are_there_at_once():
    values = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(to_device(CPU, values.T), values.T)
    target = torch.zeros(2, 2, dtype=torch.int32)
    send_into([(target, values)])
    assert torch.equal(target, values.int())


def test_fields_by_their_names():
    @dataclass
    class Fields:
        one: torch.Tensor
        other: torch.Tensor

    fields = Fields(torch.arange(3), torch.zeros(0))
    there = fields_to_device(CPU, fields, ("other", "one"))
    assert there.keys() == {"other", "one"}
    assert all(torch.equal(there[name], getattr(fields, name)) for name in there)


def test_a_value_of_any_stride():
    device = LateDevice()
    stage = Stage(torch.zeros(NUM_WORDS, dtype=torch.int32), device.read)
    every = torch.arange(12, dtype=torch.int64).reshape(3, 4)
    target = torch.zeros(3, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    stage.send([(target, every[:, 2]), (one, every[1:2, 3])])
    device.step()
    assert torch.equal(target, every[:, 2])
    assert int(one) == 7


def test_tensors_that_were_received_together_are_split_again():
    values = [torch.arange(6).view(2, 3).T, torch.empty(0, 4, dtype=torch.int64), torch.tensor([7])]
    found = received_together(values)
    assert [each.tolist() for each in found] == [each.tolist() for each in values]
    assert [each.shape for each in found] == [each.shape for each in values]
    assert received_together([]) == []
