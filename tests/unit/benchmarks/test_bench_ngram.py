"""Drafts of a step where a text stands in for the model."""

from __future__ import annotations

from bench_ngram import steps_of

PROMPT = list(range(100))


def test_text_that_is_new_takes_a_step_for_each_draft():
    assert steps_of(PROMPT, list(range(200, 264))) == 1.0


def test_repeated_text_takes_few_steps():
    assert steps_of(PROMPT, list(range(64))) > 4


def test_no_step_goes_beyond_a_token_that_no_proposal_foretold():
    # Every second token is new, so that no two tokens have come before.
    answer = [token for pair in zip(range(40), range(500, 540), strict=True) for token in pair]
    assert steps_of(PROMPT, answer) == 1.0
