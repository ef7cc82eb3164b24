"""How many tokens are proposed, from where, and what a request learns from those that were kept."""

from __future__ import annotations

import pytest

from sglang_kvspec.planning.proposals import (
    MOST_PROPOSED,
    SHARED_CHUNK,
    RequestNgrams,
    SharedNgrams,
    proposal_len,
)

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
# Ends with the start of the prompt.
OUTPUT = [20, 21, 1, 2]


def ngrams_of(prompt=PROMPT, output=OUTPUT, shared=None):
    ngrams = RequestNgrams(shared)
    ngrams.follow(prompt, output)
    return ngrams


@pytest.mark.parametrize(
    ("probability", "expected"), [(0.0, 0), (0.05, 0), (0.5, 2), (0.8, 6), (0.95, 15), (0.999, 16)]
)
def test_more_is_proposed_where_more_is_kept(probability, expected):
    assert proposal_len(probability, MOST_PROPOSED) == expected


def test_no_more_is_proposed_than_there_is_room_for():
    assert [proposal_len(0.99, most) for most in (0, 1, 5)] == [0, 1, 5]


def test_the_text_behind_a_match_is_proposed():
    assert ngrams_of().propose([], 5).tokens == [3, 4]
    assert ngrams_of().propose([3], 1).tokens == [4]
    assert ngrams_of().propose([], 0).tokens == []


def test_nothing_is_proposed_without_a_match():
    proposal = ngrams_of().propose([99], 5)
    assert proposal.tokens == []
    assert proposal.source is None


def test_a_text_may_be_followed_in_any_pieces():
    whole, pieces = ngrams_of(), RequestNgrams()
    for count in range(len(OUTPUT) + 1):
        pieces.follow(PROMPT, OUTPUT[:count])
        pieces.follow(PROMPT, OUTPUT[:count])
    for drafts in ([], [3], [3, 4], [9]):
        assert pieces.propose(drafts, 4) == whole.propose(drafts, 4)


def test_kept_proposals_lead_to_longer_ones():
    prompt = list(range(100))
    ngrams = ngrams_of(prompt, [0, 1])
    lengths = []
    for _ in range(8):
        proposal = ngrams.propose([], 50)
        lengths.append(len(proposal.tokens))
        ngrams.observe(proposal, len(proposal.tokens))
    assert lengths == sorted(lengths)
    assert lengths[-1] == MOST_PROPOSED


def test_rejected_proposals_end_them_and_time_brings_them_back():
    ngrams = ngrams_of()
    lengths = []
    for _ in range(200):
        proposal = ngrams.propose([], 5)
        lengths.append(len(proposal.tokens))
        ngrams.observe(proposal, 0)
    first_stop = lengths.index(0)
    assert first_stop < 20
    assert 0 < sum(n > 0 for n in lengths[first_stop:]) < 40


def test_each_length_of_a_match_has_an_estimate_of_its_own():
    ngrams = ngrams_of(PROMPT, [50, 51, 1, 2])
    for _ in range(20):
        ngrams.observe(ngrams.propose([], 5), 0)
    assert ngrams.propose([], 5).tokens == []
    assert ngrams.propose([3], 5).tokens == [4, 5]


def test_an_observation_without_a_match_changes_nothing():
    ngrams = ngrams_of()
    for _ in range(50):
        ngrams.observe(ngrams.propose([99], 5), 0)
    assert ngrams.propose([], 5).tokens == [3, 4]


def test_requests_do_not_see_each_other():
    ngrams_of([30, 31, 32, 33], [40] * 3 * SHARED_CHUNK)
    assert ngrams_of([70], [30, 31]).propose([], 5).tokens == []


def test_shared_outputs_are_proposed_to_other_requests():
    shared = SharedNgrams()
    other = list(range(100, 100 + 2 * SHARED_CHUNK))
    ngrams_of([1], other, shared)
    reader = ngrams_of([70], [110, 111], shared)
    assert reader.propose([], 5).tokens == [112, 113]
    # A longer match in its own text is preferred, and one as long, too.
    own = ngrams_of([110, 111, 5, 6, 7], [110, 111], shared)
    assert own.propose([], 5).tokens == [5, 6]


def test_prompts_are_not_shared():
    shared = SharedNgrams()
    ngrams_of(list(range(100, 200)), [1] * SHARED_CHUNK, shared)
    assert ngrams_of([70], [110, 111], shared).propose([], 5).tokens == []


def test_shared_chunks_overlap():
    shared, writer = SharedNgrams(), RequestNgrams()
    writer = RequestNgrams(shared)
    output = list(range(100, 100 + 3 * SHARED_CHUNK))
    for count in range(1, len(output) + 1):
        writer.follow([1], output[:count])
    assert len(shared.index) < 2 * len(output)
    for start in range(len(output) - 3):
        reader = ngrams_of([70], output[start : start + 2], shared)
        tokens = reader.propose([], 2).tokens
        assert tokens == output[start + 2 : start + 2 + len(tokens)]
        assert tokens


def test_outputs_of_two_requests_are_no_text():
    shared = SharedNgrams()
    shared.add([1, 2, 3])
    shared.add([4, 5, 6])
    assert ngrams_of([70], [2, 3], shared).propose([], 5).tokens == []


def test_a_look_up_returns_all_that_follows_a_match():
    found = ngrams_of(list(range(30)), [0, 1]).look_up([])
    assert found.tokens == list(range(2, 2 + MOST_PROPOSED))
    assert found.probability == 0.5
    assert found.first(3).tokens == [2, 3, 4]
    assert ngrams_of().look_up([99]).probability == 0


def test_a_trial_learns_from_the_tokens_that_came():
    kept, wrong = (ngrams_of(list(range(30)), [0, 1]) for _ in range(2))
    for ngrams, came in ((kept, [2, 3, 4]), (wrong, [2, 9])):
        ngrams.begin_trial(ngrams.look_up([]), [], 2)
        ngrams.end_trial([0, 1, *came], [])
    # Each three or two tokens came; of the latter one was wrong.
    assert kept.look_up([]).probability == pytest.approx(3.9 / 4.8)
    assert wrong.look_up([]).probability == pytest.approx(1.9 / 3.8)


def test_a_trial_reads_drafts_where_nothing_was_verified():
    ngrams = ngrams_of(list(range(30)), [0, 1])
    ngrams.begin_trial(ngrams.look_up([2]), [2], 2)
    ngrams.end_trial([0, 1], [2, 3, 4])
    assert ngrams.look_up([2]).probability == pytest.approx(2.9 / 3.8)
    # The trial is over.
    ngrams.end_trial([0, 1], [2, 9])
    assert ngrams.look_up([2]).probability == pytest.approx(2.9 / 3.8)


def test_a_trial_without_tokens_changes_nothing():
    ngrams = ngrams_of(list(range(30)), [0, 1])
    ngrams.begin_trial(ngrams.look_up([]), [], 2)
    ngrams.end_trial([0, 1], [])
    assert ngrams.look_up([]).probability == 0.5
