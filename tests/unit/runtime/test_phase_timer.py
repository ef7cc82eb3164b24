"""Marks and the seconds between them, on a clock that only the test advances."""

from __future__ import annotations

import time

import pytest
import torch

from sglang_kvspec.runtime.phase_timer import PhaseTimer, TotalTimer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture
def timer():
    return PhaseTimer(torch.device("cpu"))


def test_phases_lie_between_marks(timer, clock):
    for moment in (100.0, 100.5, 102.5, 102.5):
        clock.now = moment
        timer.mark()
    clock.now = 999.0
    assert timer.seconds() == [0.5, 2.0, 0.0]


def test_the_time_between_two_readings_is_no_phase(timer, clock):
    timer.mark()
    clock.now += 1
    timer.mark()
    assert timer.seconds() == [1.0]
    clock.now += 50
    timer.mark()
    clock.now += 2
    timer.mark()
    assert timer.seconds() == [2.0]


def test_fewer_than_two_marks_make_no_phase(timer):
    assert timer.seconds() == []
    timer.mark()
    assert timer.seconds() == []
    assert timer.seconds() == []


def test_the_clock_is_that_of_time_perf_counter(timer):
    before = time.perf_counter()
    timer.mark()
    inner = time.perf_counter()
    while time.perf_counter() == inner:
        pass
    timer.mark()
    (seconds,) = timer.seconds()
    assert 0 < seconds <= time.perf_counter() - before


def test_phases_that_recur_add_up(clock):
    timer = TotalTimer(torch.device("cpu"))
    for seconds in (1.0, 0.0, 2.5):
        with timer:
            clock.now += seconds
        clock.now += 50
    assert timer.seconds == 3.5


def test_a_phase_of_a_device_counts_once_it_is_over(monkeypatch, clock):
    """Phases of a stream end in order, so those behind an unfinished one are not asked."""
    events = []

    class Event:
        def __init__(self, **kwargs):
            events.append(self)
            self.is_over, self.at = False, 0.0

        def record(self):
            self.at = clock.now

        def query(self):
            return self.is_over

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = TotalTimer(torch.device("cuda"))
    for seconds in (1.0, 2.0):
        with timer:
            clock.now += seconds
    assert timer.seconds == 0
    events[3].is_over = True
    assert timer.seconds == 0
    events[1].is_over = True
    assert timer.seconds == 3.0
    assert timer.seconds == 3.0
