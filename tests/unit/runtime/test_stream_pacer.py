"""StreamPacer: the time at which each token leaves, on a clock that the tests set."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.runtime.stream_pacer import MARGIN, RATIOS, WEIGHT, StreamPacer


class Reader:
    """Sender and reader of a pacer, which records when each token arrived."""

    def __init__(self):
        self.pacer = StreamPacer()
        self.arrivals = []

    def note(self, items, now):
        self.arrivals += [(item, now) for item in items]

    def round(self, key, items, now, *, ends=False, expected_s=0.0):
        """Send the tokens of a round at once, as a verification emits them."""
        for i, item in enumerate(items):
            following = len(items) - 1 - i
            is_last = ends and not following
            ready = self.pacer.receive(
                key, item, following=following, is_last=is_last, now=now, expected_s=expected_s
            )
            self.note(ready, now)

    def read_until(self, end):
        """Take the tokens that are due up to this time, as a timer does."""
        while (due := self.pacer.next_due()) is not None and due <= end:
            self.note(self.pacer.take_due(due), due)

    def times(self):
        return dict(self.arrivals)

    def items(self):
        return [item for item, _ in self.arrivals]


@pytest.fixture
def reader():
    return Reader()


def settled(reader, key="s", period=1.0, rounds=40):
    """Send rounds of one token until the pacer knows the period. Return the time of the next
    round."""
    for i in range(rounds):
        reader.round(key, [f"{key}-{i}"], i * period)
    reader.arrivals.clear()
    return rounds * period


def test_the_first_round_of_a_stream_is_not_held(reader):
    reader.round("s", "abc", 5.0)
    assert reader.arrivals == [("a", 5.0), ("b", 5.0), ("c", 5.0)]
    assert reader.pacer.next_due() is None


def test_the_first_token_leaves_at_once_where_the_next_round_is_not_known(reader):
    now = settled(reader)
    reader.round("s", "abcd", now)
    assert reader.arrivals == [("a", now)]


def test_the_first_token_leaves_at_once_where_the_stream_ran_dry(reader):
    now = settled(reader)
    reader.round("s", "abcd", now, expected_s=0.5)
    assert reader.arrivals == [("a", now)]


def test_a_round_is_spaced_evenly_behind_the_last_token(reader):
    now = settled(reader)
    reader.round("s", "abcd", now)
    reader.read_until(now + 1)
    reader.round("s", "efgh", now + 1, expected_s=1.0)
    reader.read_until(now + 10)
    assert reader.items() == list("abcdefgh")
    last, *times = [at for _, at in reader.arrivals[3:]]
    steps = [later - earlier for earlier, later in itertools.pairwise([last, *times])]
    # The steps equal the gap behind the round, if the next round arrives when expected.
    step = (now + 1 + MARGIN - last) / 5
    assert steps == pytest.approx([step] * 4, abs=0.01)


def test_a_round_that_brings_one_token_makes_two_gaps_of_one(reader):
    now = settled(reader)
    reader.round("s", "abcd", now)
    reader.read_until(now + 1)
    last = reader.arrivals[-1][1]
    reader.round("s", "e", now + 1, expected_s=1.0)
    reader.read_until(now + 10)
    assert reader.times()["e"] - last == pytest.approx((now + 1 + MARGIN - last) / 2, abs=0.01)


def test_tokens_of_a_round_are_spread_over_the_expected_time(reader):
    now = settled(reader)
    reader.round("s", "abcd", now)
    reader.read_until(now + 1)
    offsets = [at - now for _, at in reader.arrivals]
    assert reader.items() == list("abcd")
    assert offsets == pytest.approx([n * MARGIN / 4 for n in range(4)], abs=0.01)


@pytest.mark.parametrize("period", [0.02, 4.0])
def test_spacing_adapts_to_another_round_time(reader, period):
    now = settled(reader)
    for _ in range(60):
        reader.round("s", ["x"], now)
        now += period
    reader.arrivals.clear()
    reader.round("s", "ab", now)
    reader.read_until(now + 10)
    assert reader.times()["b"] - now == pytest.approx(MARGIN * period / 2, rel=0.05)


def test_a_slower_round_lets_the_next_one_be_expected_slower(reader):
    now = settled(reader)
    reader.round("s", ["x"], now)
    reader.round("s", "ab", now + 1.3)
    reader.read_until(now + 10)
    # The mean ratio and its mean deviation both include the 0.3.
    learned = 1 + 2 * WEIGHT * 0.3
    assert reader.times()["b"] - (now + 1.3) == pytest.approx(MARGIN * 1.3 * learned / 2, rel=0.01)


def test_what_is_learned_of_one_round_is_bounded(reader):
    now = settled(reader)
    reader.round("s", ["x"], now)
    reader.round("s", "ab", now + 50)
    reader.read_until(now + 1000)
    learned = 1 + 2 * WEIGHT * (RATIOS[1] - 1)
    assert reader.times()["b"] - (now + 50) == pytest.approx(MARGIN * 50 * learned / 2, rel=0.01)


def test_a_given_time_counts_more_than_what_rounds_took(reader):
    now = settled(reader)
    reader.round("s", "abcd", now, expected_s=4.0)
    reader.read_until(now + 10)
    # The last token of the round before left a second ago.
    step = (4 * MARGIN + 1) / 5
    offsets = [at - now for _, at in reader.arrivals]
    assert offsets == pytest.approx([(n + 1) * step - 1 for n in range(4)], abs=0.05)


def test_a_quick_round_among_slow_ones_does_not_hurry_the_next(reader):
    """An expectation that is too short would leave the stream without tokens."""
    now = settled(reader)
    reader.round("s", ["x"], now)
    reader.round("s", "ab", now + 0.1)
    reader.read_until(now + 10)
    assert reader.times()["b"] - (now + 0.1) > 0.35


def test_tokens_that_a_round_left_go_before_those_of_the_next_one(reader):
    """All tokens are spread together, and fill the gap behind a round of few tokens."""
    now = settled(reader)
    reader.round("s", "abcd", now)
    reader.round("s", "ef", now + 0.3)
    assert reader.arrivals[:2] == [("a", now), ("b", pytest.approx(now + 0.3))]
    reader.read_until(now + 10)
    assert reader.items() == list("abcdef")
    times = [at for _, at in reader.arrivals[1:]]
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert steps == pytest.approx([steps[0]] * 4)


def test_a_round_is_no_longer_than_it_is_expected_to_be(reader):
    """The last of many tokens are all due at the end."""
    now = settled(reader)
    reader.round("s", range(40), now)
    reader.read_until(now + 10)
    # Almost all rounds so far took the expected time.
    assert reader.arrivals[-1][1] - now == pytest.approx(1.0, abs=0.01)
    assert reader.arrivals[30][1] - now < 0.9


def test_no_token_is_held_for_two_rounds(reader):
    now = settled(reader)
    reader.round("s", "abcdefgh", now)
    reader.round("s", "ij", now + 0.01)
    assert reader.items() == list("ab")
    reader.round("s", "k", now + 0.02)
    assert reader.items()[:8] == list("abcdefgh")
    assert "k" not in reader.items()


def test_tokens_behind_flushed_ones_are_not_held_for_two_rounds(reader):
    now = settled(reader)
    reader.round("s", "abcdefgh", now)
    reader.round("s", "ijkl", now + 0.01)
    reader.round("s", "m", now + 0.02)
    assert reader.items()[:8] == list("abcdefgh")
    assert "l" not in reader.items()
    reader.round("s", "n", now + 0.03)
    assert reader.items()[:12] == list("abcdefghijkl")


def test_the_end_of_an_answer_holds_nothing(reader):
    now = settled(reader)
    reader.round("s", "abcd", now)
    reader.round("s", "efg", now + 0.1, ends=True)
    assert reader.items() == list("abcdefg")
    assert reader.times()["g"] == now + 0.1
    assert reader.pacer.num_streams == 0
    assert reader.pacer.next_due() is None


def test_a_stream_of_one_token_is_forgotten(reader):
    reader.round("s", "a", 0.0, ends=True)
    assert reader.items() == ["a"]
    assert reader.pacer.num_streams == 0


def test_a_token_that_comes_after_its_time_is_not_held(reader):
    now = settled(reader)
    reader.note(reader.pacer.receive("s", "a", following=2, is_last=False, now=now), now)
    late = now + 0.9
    reader.note(reader.pacer.receive("s", "b", following=1, is_last=False, now=late), late)
    assert reader.times()["b"] == late


def test_a_late_token_waits_for_the_tokens_before_it(reader):
    now = settled(reader)
    reader.note(reader.pacer.receive("s", "a", following=2, is_last=False, now=now), now)
    reader.note(reader.pacer.receive("s", "b", following=1, is_last=False, now=now), now)
    late = now + 0.9
    reader.note(reader.pacer.receive("s", "c", following=0, is_last=False, now=late), late)
    reader.note(reader.pacer.take_due(late), late)
    assert reader.items() == list("abc")


def test_a_dropped_stream_gives_no_token_and_no_due_time(reader):
    now = settled(reader)
    reader.round("s", "abcd", now)
    reader.pacer.drop("s")
    assert reader.pacer.num_streams == 0
    assert reader.pacer.next_due() is None
    assert reader.pacer.take_due(now + 100) == []
    reader.pacer.drop("s")


def test_streams_do_not_delay_each_other(reader):
    slow = settled(reader, "slow", period=1.0)
    quick = settled(reader, "quick", period=0.1, rounds=400)
    assert slow == quick
    reader.round("slow", ["s1", "s2"], slow)
    reader.round("quick", ["q1", "q2"], slow)
    assert reader.items() == ["s1", "q1"]
    reader.read_until(slow + 0.2)
    assert reader.items() == ["s1", "q1", "q2"]
    reader.pacer.drop("quick")
    reader.read_until(slow + 1)
    assert reader.items() == ["s1", "q1", "q2", "s2"]


def test_many_streams_are_read_in_the_order_of_their_times(reader):
    for i in range(100):
        settled(reader, f"{i}", period=1 + i / 100, rounds=30)
    for i in range(100):
        reader.round(f"{i}", [f"a{i}", f"b{i}"], 100.0)
    assert len(reader.arrivals) == 100
    reader.read_until(1000.0)
    assert sorted(reader.items()) == sorted(f"{name}{i}" for name in "ab" for i in range(100))
    times = [at for _, at in reader.arrivals]
    assert times == sorted(times)


@dataclass(frozen=True)
class Round:
    stream: int
    num_tokens: int
    gap_s: float
    token_gap_s: float
    ends: bool


rounds_of_streams = st.lists(
    st.builds(
        Round,
        stream=st.integers(0, 2),
        num_tokens=st.integers(1, 6),
        gap_s=st.sampled_from([0.0, 0.001, 0.1, 0.5, 3.0]),
        token_gap_s=st.sampled_from([0.0, 0.0, 0.001, 0.2]),
        ends=st.booleans(),
    ),
    max_size=25,
)


@given(rounds=rounds_of_streams, reads=st.booleans())
def test_every_token_leaves_once_in_order_and_within_two_rounds(rounds, reads):
    """reads: the timer runs between rounds. Without it, only rounds and ends release tokens."""
    reader, now, number = Reader(), 0.0, 0
    sent, due_by, last, left = {}, {}, [], {}
    for each in rounds:
        now += each.gap_s
        gone = set(reader.items())
        open_items = [item for item in sent if item[0] == each.stream and item not in gone]
        for i in range(each.num_tokens):
            now += each.token_gap_s if i else 0.0
            if reads:
                reader.read_until(now)
            item, number = (each.stream, number), number + 1
            following = each.num_tokens - 1 - i
            is_last = each.ends and not following
            sent[item] = now
            if not i:
                # Tokens of the last two rounds leave with the first token of this round.
                gone = set(reader.items())
                open_items = [other for other in open_items if other not in gone]
                due_by |= {other: now for other in open_items if other in left.get(each.stream, ())}
                left[each.stream] = set(open_items)
            if is_last:
                last.append(item)
                mine = [item for item in sent if item[0] == each.stream]
                due_by |= {item: now for item in mine if item not in due_by}
            reader.note(
                reader.pacer.receive(
                    each.stream, item, following=following, is_last=is_last, now=now
                ),
                now,
            )
    reader.read_until(float("inf"))
    assert sorted(reader.items()) == sorted(sent)
    for stream in range(3):
        mine = [item for item in reader.items() if item[0] == stream]
        assert mine == sorted(mine)
    for item, at in reader.arrivals:
        assert sent[item] <= at <= due_by.get(item, float("inf"))
    for item in last:
        assert reader.times()[item] == sent[item]
    assert reader.pacer.next_due() is None
    ended = {each.stream: each.ends for each in rounds}
    assert reader.pacer.num_streams == sum(not ends for ends in ended.values())
