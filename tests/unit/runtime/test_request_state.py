"""The changes that a verification makes in a request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.planning.draft_length import AcceptanceEstimate
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams


def make_state(drafts=()):
    return RequestState(
        rid="r",
        committed_len=10,
        pending=5,
        output=[4, 5],
        params=SamplingParams(),
        remaining=30,
        drafts=list(drafts),
        draft_probs=[torch.ones(3)] * len(drafts),
    )


def assert_committed(state, before, emitted):
    """Check that `state` is `before` (committed_len, output, remaining) after committing
    `emitted`."""
    committed_len, output, remaining = before
    assert state.committed_len == committed_len + len(emitted)
    assert state.output == output + emitted
    assert state.pending == state.last_token == emitted[-1]
    assert state.remaining == remaining - len(emitted)
    assert state.drafts == state.draft_probs == [], "drafts outlived their verification"
    assert state.next_position == state.committed_len


def snapshot(state):
    return state.committed_len, list(state.output), state.remaining


@given(num_drafts=st.integers(0, 6), data=st.data())
def test_commit_keeps_accepted_drafts_and_drops_the_rest(num_drafts, data):
    state = make_state(range(num_drafts))
    for _ in range(3):
        before = snapshot(state)
        num_accepted = data.draw(st.integers(0, len(state.drafts)))
        emitted = [*state.drafts[:num_accepted], 99]
        state.commit(emitted)
        assert_committed(state, before, emitted)
        state.drafts.extend(range(num_drafts))
        state.draft_probs.extend([torch.ones(3)] * num_drafts)


def test_the_last_token_is_the_last_draft_or_the_pending_one():
    state = make_state()
    assert (state.last_token, state.next_position) == (5, 10)
    state.drafts += [7, 8]
    assert (state.last_token, state.next_position) == (8, 12)


def test_commit_teaches_the_estimate():
    state, estimate = make_state([1, 2, 3]), AcceptanceEstimate()
    state.commit([1, 9])
    estimate.observe(3, 1)
    assert state.acceptance == estimate
    state.commit([4])
    estimate.observe(0, 0)
    assert state.acceptance == estimate


def test_each_request_has_its_own_lists_and_estimate():
    one, other = make_state(), make_state()
    one.drafts.append(1)
    one.acceptance.observe(4, 0)
    assert other.drafts == []
    assert other.acceptance == AcceptanceEstimate()


def test_a_tail_is_computed_with_the_first_draft_and_the_first_verification():
    state = make_state()
    state.tail += [2, 3]
    assert (state.verified_len, state.next_position) == (8, 10)
    assert state.undrafted == state.unverified == [2, 3, 5]
    state.drafts += [7, 8]
    assert (state.undrafted, state.unverified) == ([8], [2, 3, 5, 7, 8])
    state.commit([7, 9])
    assert (state.verified_len, state.committed_len) == (12, 12)
    assert state.undrafted == state.unverified == [9]


# Wrong rules must be noticed


def keep_drafts(state, emitted, right=RequestState.commit):
    drafts = list(state.drafts)
    right(state, emitted)
    state.drafts.extend(drafts)


def count_rejected_as_committed(state, emitted, right=RequestState.commit):
    num_drafts = len(state.drafts)
    right(state, emitted)
    state.committed_len += num_drafts + 1 - len(emitted)


@pytest.mark.parametrize("wrong", [keep_drafts, count_rejected_as_committed])
def test_a_skipped_rollback_is_noticed(monkeypatch, wrong):
    monkeypatch.setattr(RequestState, "commit", wrong)
    state = make_state([1, 2, 3])
    before = snapshot(state)
    state.commit([1, 9])
    with pytest.raises(AssertionError):
        assert_committed(state, before, [1, 9])
