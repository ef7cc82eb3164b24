"""Rounds while a client reads a stream: short where a machine is slow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.engine.ports import SchedulerParts
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.round_scheduler import FIRST_STREAMED_LEN, RoundScheduler
from sglang_kvspec.planning.draft_length import DraftCost
from sglang_kvspec.planning.rounds import RoundCost
from sglang_kvspec.runtime.ranks import Ranks

# Verifications cost much, so that long rounds pay.
COST = RoundCost(step=0.02, row=1e-3, request=0.1, token=1e-3)


@pytest.fixture
def lens(make_kv):
    def plan(*streamed, most_s, measured=True):
        clock = SimpleNamespace(has_measured=measured, cost=lambda *_: COST)
        planner = ResidualPlanner(make_kv())
        parts = SchedulerParts(
            KVSpecConfig(), clock, planner, Ranks(), DraftCost(), stream_round_s=most_s
        )
        scheduler = RoundScheduler(parts)
        states = [request_state(str(i)) for i in range(len(streamed))]
        for state, is_streamed in zip(states, streamed, strict=True):
            state.is_streamed = is_streamed
        return scheduler.plan(states).lens

    return plan


def test_a_stream_shortens_rounds_for_all(lens):
    free = lens(False, False, most_s=0.35)
    assert COST.seconds(free) > 0.4
    short = lens(True, False, most_s=0.35)
    assert COST.seconds(short) <= 0.35
    assert COST.seconds([n + 1 for n in short]) > 0.35


def test_without_a_limit_a_stream_changes_nothing(lens):
    assert lens(True, True, most_s=None) == lens(False, False, most_s=None)


def test_one_draft_is_made_however_slow_the_machine(lens):
    assert lens(True, most_s=1e-6) == [1]


def test_the_first_round_of_a_stream_is_short(lens):
    assert lens(True, most_s=1.0, measured=False) == [FIRST_STREAMED_LEN]
    assert lens(False, most_s=1.0, measured=False) > [FIRST_STREAMED_LEN]
