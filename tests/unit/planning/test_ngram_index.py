"""The index finds what a search of the whole text finds, in bounded memory."""

from __future__ import annotations

import random

import pytest

from sglang_kvspec.planning.ngram_index import (
    LONGEST,
    MOST_MISSES,
    SEPARATOR,
    SHORTEST,
    NgramIndex,
)


def searched(text, newest):
    """Return (length, end) of the last occurrence of the longest suffix of `newest`, by search."""
    for length in range(min(LONGEST, len(newest)), SHORTEST - 1, -1):
        suffix = newest[-length:]
        # A token must follow the occurrence.
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == suffix:
                return length, end
    return None


@pytest.mark.parametrize("vocab", [2, 5, 40])
@pytest.mark.parametrize("seed", range(3))
def test_a_match_is_that_of_a_search(vocab, seed):
    rng = random.Random(seed)
    index, text, found = NgramIndex(), [], 0
    for _ in range(80):
        new = [rng.randrange(vocab) for _ in range(rng.randrange(6))]
        index.extend(new)
        text += new
        drafts = [rng.randrange(vocab) for _ in range(rng.randrange(9))]
        newest = index.newest(drafts)
        assert newest == (text + drafts)[-LONGEST:]
        match = index.find(newest)
        assert match == searched(text, newest)
        found += match is not None
    assert found


def test_an_index_of_any_pieces_is_the_same():
    rng = random.Random(0)
    text = [rng.randrange(4) for _ in range(200)]
    whole, pieces = NgramIndex(), NgramIndex()
    whole.extend(text)
    for token in text:
        pieces.extend([token])
    for start in range(0, 190, 7):
        newest = text[start : start + 8]
        assert whole.find(newest) == pieces.find(newest)


def test_the_newest_tokens_do_not_match_themselves():
    index = NgramIndex()
    index.extend([1, 2, 3, 4])
    assert index.find(index.newest([])) is None
    index.extend([9, 3, 4])
    match = index.find(index.newest([]))
    assert match == (2, 3)
    assert index.following(match, [], 2) == [9, 3]


def test_the_last_occurrence_wins():
    index = NgramIndex()
    index.extend([1, 2, 7, 1, 2, 8, 5])
    match = index.find(index.newest([1, 2]))
    assert index.following(match, [1, 2], 2) == [8, 5]


def test_the_longest_match_wins_over_a_later_one():
    index = NgramIndex()
    index.extend([1, 2, 3, 7, 9, 2, 3, 8, 5])
    match = index.find(index.newest([1, 2, 3]))
    assert match.length == 3
    assert index.following(match, [1, 2, 3], 1) == [7]


def test_a_run_goes_on_beyond_the_text():
    index = NgramIndex()
    index.extend([4, 5, 6, 4, 5])
    match = index.find(index.newest([6]))
    assert index.following(match, [6], 7) == [4, 5, 6, 4, 5, 6, 4]


def test_drafts_are_looked_up_and_not_remembered():
    index = NgramIndex()
    index.extend([1, 2, 3])
    assert index.find(index.newest([1, 2])) == (2, 1)
    assert index.find(index.newest([8, 1])) is None
    assert len(index) == index.num_added == 3


def test_a_proposal_ends_at_a_separator():
    index = NgramIndex()
    index.extend([1, 2, 3, SEPARATOR, 2, 4])
    match = index.find([1, 2])
    assert index.following(match, (), 5) == [3]
    # An n-gram that ends with a separator is no shorter n-gram.
    index.extend([6, 7, SEPARATOR, 9])
    assert index.find([6, 7]) == (2, 7)


@pytest.mark.parametrize("tokens", [[0, 0, 0, 0], [2**31 - 1] * 4])
def test_every_token_of_a_vocabulary_is_a_key(tokens):
    index = NgramIndex()
    index.extend(tokens)
    assert index.find(tokens) == (3, 2)


def test_memory_is_bounded_and_the_newest_half_is_kept():
    rng = random.Random(1)
    index, text = NgramIndex(most_tokens=100), []
    for _ in range(60):
        new = [rng.randrange(5) for _ in range(rng.randrange(20))]
        index.extend(new)
        text += new
        assert len(index) <= 100
        kept = text[len(text) - len(index) :]
        newest = index.newest([])
        assert index.find(newest) == searched(kept, newest)
    assert index.num_added == len(text) > 300
    assert len(index) >= 50


def test_a_bound_of_no_use_is_refused():
    with pytest.raises(ValueError, match="most_tokens must be at least 12, got 11"):
        NgramIndex(most_tokens=11)


def test_a_search_gives_up_in_a_text_of_one_lowest_byte():
    """Anyone may send such a prompt, and the search of all of it takes the CPU 0.1 s a draft."""
    wanted, other = [256 * n for n in range(1, 3)], 256 * 7
    few, many = NgramIndex(), NgramIndex()
    few.extend([*wanted, *[other] * (MOST_MISSES // 2)])
    many.extend([*wanted, *[other] * (MOST_MISSES * 2)])
    assert few.find(wanted) == (2, 1)
    assert many.find(wanted) is None
