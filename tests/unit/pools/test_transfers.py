"""Values in memory that a device reads later: none is overwritten before it has."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.pools.transfers import Stage, send_into, sent_to

CPU = torch.device("cpu")
NUM_WORDS = 32


@dataclass
class Reading:
    """Of a device that does one after the other."""

    device: LateDevice
    target: torch.Tensor
    words: torch.Tensor
    is_over: bool = False

    def query(self):
        return self.is_over

    def synchronize(self):
        self.device.waits += not self.is_over
        while not self.is_over:
            self.device.step()


class LateDevice:
    def __init__(self):
        self.queue, self.waits = [], 0

    def read(self, target, words):
        assert target.nbytes == words.nbytes
        self.queue.append(Reading(self, target, words))
        return self.queue[-1]

    def step(self):
        reading = self.queue.pop(0)
        reading.target.view(torch.int32).copy_(reading.words)
        reading.is_over = True


@given(st.lists(st.tuples(st.integers(0, NUM_WORDS), st.integers(0, 3)), max_size=60), st.randoms())
@settings(max_examples=300, deadline=None)
def test_every_target_gets_its_values(sends, rng):
    device = LateDevice()
    stage = Stage(torch.zeros(NUM_WORDS, dtype=torch.int32), device.read)
    sent = []
    for count, num_steps in sends:
        values = torch.tensor([rng.randrange(1 << 30) for _ in range(count)], dtype=torch.int32)
        target = torch.zeros(count, dtype=torch.int32)
        stage.send(target, values)
        sent.append((target, values))
        for _ in range(min(num_steps, len(device.queue))):
            device.step()
    while device.queue:
        device.step()
    assert all(torch.equal(*pair) for pair in sent)


def test_nobody_waits_while_there_is_room():
    device = LateDevice()
    stage = Stage(torch.zeros(NUM_WORDS, dtype=torch.int32), device.read)
    for number in range(100):
        stage.send(torch.zeros(10, dtype=torch.int32), torch.full((10,), number).int())
        if number >= 2:
            device.step()
    assert device.waits == 0
    # Two are unread now, and the memory holds three.
    for _ in range(2):
        stage.send(torch.zeros(10, dtype=torch.int32), torch.zeros(10).int())
    assert device.waits == 1


def test_the_test_would_see_values_that_are_overwritten(monkeypatch):
    monkeypatch.setattr(Stage, "_take", lambda stage, num_words: (0, num_words))
    with pytest.raises(AssertionError):
        test_every_target_gets_its_values.hypothesis.inner_test([(3, 0), (3, 0)], random.Random(0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_bytes_that_are_no_whole_words(dtype):
    device = LateDevice()
    stage = Stage(torch.zeros(NUM_WORDS, dtype=torch.int32), device.read)
    values = torch.tensor([[1, 0, 1], [1, 1, 0]]).to(dtype)
    words = torch.zeros(-(-values.nbytes // 4), dtype=torch.int32)
    stage.send(words, values)
    device.step()
    found = words.view(torch.uint8)[: values.nbytes].view(dtype).view(values.shape)
    assert torch.equal(found, values)


def test_on_a_cpu_values_are_there_at_once():
    values = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(sent_to(CPU, values.T), values.T)
    target = torch.zeros(2, 2, dtype=torch.int32)
    send_into(target, values)
    assert torch.equal(target, values.int())
