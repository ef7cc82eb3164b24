"""Costs of an iteration and tokens of a cycle, compared with sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.costs import AcceptanceCurve, IterationCosts
from sglang_kvspec.planning.draft_length import expected_tokens

COSTS = IterationCosts(
    overhead_s=1.0,
    kvspec_s=0.5,
    weights_s=10.0,
    token_s=0.5,
    plain_kv_token_s=0.04,
    draft_kv_token_s=0.01,
    verify_kv_token_s=0.02,
    verify_pair_s=0.001,
)


def test_an_iteration_is_the_sum_of_its_parts():
    # 2 drafts on 300 cached tokens, and 1 verification of 5 tokens on 100: 1 + 0.5, weights 10 (7
    # tokens need 3.5), drafts 3, reads of the verification 2, its arithmetic 0.5.
    assert COSTS.seconds(2, 300, 1, 5, 100) == pytest.approx(14.5 + hypot(2, 0.5))


def test_scoring_is_paid_by_verifications():
    scored = replace(COSTS, score_kv_token_s=0.03)
    assert scored.seconds(2, 300, 1, 5, 100) == pytest.approx(14.5 + hypot(2, 0.5) + 3)
    assert scored.seconds(2, 300, 0, 0, 0) == COSTS.seconds(2, 300, 0, 0, 0)


@given(st.floats(0, 1), st.floats(0, 1))
def test_thinned_curves_of_independent_drafts_multiply(probability, kept):
    thinned = AcceptanceCurve.geometric(probability, 20).thinned(kept)
    wanted = AcceptanceCurve.geometric(probability * kept, 20)
    assert thinned.accepted == pytest.approx(wanted.accepted)


def test_thinned_curves_follow_the_measured_one():
    """Between measured lengths each draft is accepted alike."""
    thinned = AcceptanceCurve((2, 4), (1.0, 1.5)).thinned(0.5)
    assert thinned.accepted == pytest.approx(
        (0.5 * (0.5 + 0.25), 0.5 * (0.5 + 0.25) + 0.25 * (0.125 + 0.0625))
    )


def test_many_tokens_are_bound_by_arithmetic():
    # 40 tokens: products 20, which exceed weights 10. 30 query tokens in a row: arithmetic 3, reads
    # 2.
    assert COSTS.seconds(10, 0, 1, 30, 100) == pytest.approx(1 + 0.5 + 20 + hypot(2, 3))


def test_pairs_are_counted_by_row():
    # Two rows of 15 tokens on 100 each make 3000 pairs, not 6000.
    assert COSTS.verify_attention_seconds(2, 30, 200) == pytest.approx(hypot(4, 3))
    assert COSTS.verify_attention_seconds(2, 60, 200) == pytest.approx(hypot(4, 6))


def test_plain_decoding_has_no_costs_of_kvspec():
    assert COSTS.plain_seconds(4, 1000) == pytest.approx(1 + 10 + 40)


def test_nothing_takes_no_time():
    assert COSTS.seconds(0, 0, 0, 0, 0) == 0
    assert COSTS.plain_seconds(0, 0) == 0


def test_experts_are_read_as_tokens_reach_them():
    costs = IterationCosts(0, 2.0, 0, 0, 0, 0, experts_s=8.0, expert_share=0.25)
    assert costs.seconds(1, 0, 0, 0, 0) == pytest.approx(2 + 8 * 0.25)
    assert costs.seconds(2, 0, 0, 0, 0) == pytest.approx(2 + 8 * (1 - 0.75**2))
    assert costs.seconds(1000, 0, 0, 0, 0) == pytest.approx(10)


def test_a_faster_gpu_speeds_up_what_it_is_faster_at():
    faster = COSTS.with_faster(memory=2)
    assert faster.seconds(2, 300, 1, 5, 100) == pytest.approx(1.5 + 5 + 1.5 + hypot(1, 0.5))
    faster = COSTS.with_faster(arithmetic=2)
    assert faster.seconds(10, 0, 1, 30, 100) == pytest.approx(1.5 + 10 + hypot(2, 1.5))


@given(
    rows=st.tuples(*[st.integers(0, 500)] * 5),
    more=st.tuples(*[st.integers(0, 500)] * 5),
)
def test_more_work_of_any_kind_never_takes_less(rows, more):
    drafts, draft_kv, verifies, queries, verify_kv = rows
    # A verification has at least one query token.
    queries += verifies
    base = COSTS.seconds(drafts, draft_kv, verifies, queries, verify_kv)
    assert COSTS.seconds(drafts + more[0], draft_kv, verifies, queries, verify_kv) >= base
    assert COSTS.seconds(drafts, draft_kv + more[1], verifies, queries, verify_kv) >= base
    assert COSTS.seconds(drafts, draft_kv, verifies, queries + more[3], verify_kv) >= base
    assert COSTS.seconds(drafts, draft_kv, verifies, queries, verify_kv + more[4]) >= base


def test_a_curve_is_linear_between_measurements_and_flat_behind_them():
    curve = AcceptanceCurve((2, 4, 8), (1.8, 3.0, 4.0))
    accepted = [curve.expected_accepted(n) for n in (0, 1, 2, 3, 4, 6, 8, 9, 64)]
    assert accepted == pytest.approx([0, 0.9, 1.8, 2.4, 3.0, 3.5, 4.0, 4.0, 4.0])
    assert curve.expected_tokens(0) == 1
    assert curve.expected_tokens(4) == pytest.approx(4.0)


@given(probability=st.floats(0, 0.9999), draft_len=st.integers(0, 64))
def test_independent_drafts_make_the_geometric_sum(probability, draft_len):
    curve = AcceptanceCurve.geometric(probability, 64)
    assert curve.expected_tokens(draft_len) == pytest.approx(
        expected_tokens(probability, draft_len)
    )


def test_certain_drafts_are_all_accepted():
    assert AcceptanceCurve.geometric(1.0).expected_tokens(64) == 65


@pytest.mark.parametrize(
    ("lens", "accepted"),
    [
        ((), ()),
        ((1, 2), (0.9,)),
        ((0, 1), (0.0, 0.5)),
        ((2, 1), (1.0, 0.9)),
        ((1, 2), (0.9, 0.8)),
        ((1, 2), (0.5, 1.6)),
        ((1,), (1.1,)),
        ((1,), (float("nan"),)),
    ],
)
def test_impossible_curves_are_refused(lens, accepted):
    with pytest.raises(ConfigError, match="accept"):
        AcceptanceCurve(lens, accepted)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        AcceptanceCurve.geometric(1.5)
