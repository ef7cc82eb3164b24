"""Which draft step comes next: the one that begins the way with the most tokens a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_kvspec.planning.proposal_choice import (
    ORDINARY,
    STOP,
    Drafting,
    StepTimes,
    choose_step,
)

# Seconds of a large model, whose step hides what the CPU does.
LARGE = StepTimes(4.6e-3, 2e-4, {4: 5e-3, 16: 6e-3}, rest=3e-2, waited_rest=3.1e-2)
# Seconds of a small one, for which the CPU takes longer than the device.
SMALL = StepTimes(5.5e-4, 2e-4, {4: 1.4e-3, 16: 1.6e-3}, rest=3e-3, waited_rest=5e-3)


def drafting(probability, *, drafts=0, goal=16, num_proposed=15, acceptance=0.97):
    return Drafting(drafts, goal, num_proposed, probability, acceptance)


@pytest.mark.parametrize(
    ("times", "probability", "expected"),
    [
        (LARGE, 0.0, ORDINARY),
        (LARGE, 0.05, ORDINARY),
        (LARGE, 0.5, 4),
        (LARGE, 0.95, 16),
        (SMALL, 0.5, ORDINARY),
        (SMALL, 0.65, ORDINARY),
        (SMALL, 0.97, 16),
    ],
)
def test_proposals_must_gain_what_their_step_costs(times, probability, expected):
    assert choose_step([drafting(probability)], 0.0, times) == expected


def test_the_load_of_the_first_step_with_proposals_counts():
    request = drafting(0.97)
    assert choose_step([request], 0.0, SMALL) == 16
    slow = replace(SMALL, load=4e-3)
    assert choose_step([request], 0.0, slow) == ORDINARY
    # Later ones are loaded with the step before.
    assert choose_step([request], 1e-3, slow) == 16


def test_nothing_proposed_is_an_ordinary_round():
    requests = [drafting(0.0, num_proposed=0)] * 3
    assert choose_step(requests, 0.0, LARGE) == ORDINARY
    assert choose_step(requests, 0.0, LARGE, always=True) == ORDINARY


def test_the_batch_decides_by_its_tokens_a_second():
    silent, copies = drafting(0.0, num_proposed=0), drafting(0.9)
    assert choose_step([silent, copies, copies, copies], 0.0, LARGE) > ORDINARY
    # One of many gains less than the others lose.
    assert choose_step([silent] * 7 + [copies], 0.0, LARGE) == ORDINARY


def test_a_round_ends_where_most_requests_have_their_drafts():
    done, behind = drafting(0.0, drafts=16, num_proposed=0), drafting(0.0, drafts=4)
    slow = replace(behind, num_proposed=0)
    assert choose_step([done] * 3 + [slow], 0.02, LARGE) == STOP
    # Alone, the request goes on to its goal.
    assert choose_step([slow], 0.02, LARGE) == ORDINARY


def test_a_round_is_not_ended_before_it_drafts():
    assert choose_step([drafting(0.0, goal=1, num_proposed=0)], 0.0, SMALL) == ORDINARY


def test_proposals_may_be_forced():
    requests = [drafting(0.01)]
    assert choose_step(requests, 0.0, SMALL) == ORDINARY
    assert choose_step(requests, 0.0, SMALL, always=True) == 4


def test_a_first_step_may_pay_although_later_ones_are_ordinary():
    """The round is long, and what is proposed ends after three tokens."""
    times = replace(SMALL, wide={4: 8e-4})
    assert choose_step([drafting(0.9, num_proposed=3, goal=5)], 0.0, times) == 4


def test_without_room_for_proposals_steps_are_ordinary():
    assert choose_step([drafting(0.9)], 0.0, replace(LARGE, wide={})) == ORDINARY


@pytest.mark.parametrize(("num_proposed", "expected"), [(3, 4), (4, 16)])
def test_no_step_is_wider_than_its_tokens(num_proposed, expected):
    """The wider one seems quicker, as long as it was not measured with a context."""
    times = replace(LARGE, wide={4: 9e-3, 16: 6e-3})
    few = [drafting(0.95, num_proposed=num_proposed)]
    assert choose_step(few, 0.0, times, always=True) == expected
