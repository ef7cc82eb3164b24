"""RoundCostModel learns from rounds whose true cost is known."""

from __future__ import annotations

import itertools
import random

import pytest

from sglang_kvspec.planning.round_cost_model import ROUNDS_BEFORE_RETRY, RoundCostModel
from sglang_kvspec.planning.rounds import RoundCost, RoundRequest, plan_round

# An 8B model, by token of context: at 32K tokens a row takes 0.33 ms, and a verification 0.6 ms per
# request.
STEP_S, ROW_S, READS, TOKEN_S = 4e-3, 0.33e-3 / 32768, 0.6 / 0.33, 0.02e-3
CONTEXTS = (2048, 8192, 32768)
SHAPES = ([0] * 16, [4] * 16, [16] * 16, [16] * 8 + [4] * 8, [32] + [0] * 15, [7])


def true_cost(context, step=STEP_S, target_step=0.0):
    request = READS * ROW_S * context
    return RoundCost(step, ROW_S * context, request, TOKEN_S, target_step=target_step)


def play(clock, lens, context, slower=1.0, cost=None):
    cost = cost or true_cost(context)
    draft_s = cost.step * max(lens) + cost.row * sum(lens)
    verify_s = cost.seconds(lens) - draft_s
    clock.observe(lens, context, draft_s * slower, verify_s * slower)


def worst_error(clock, contexts=CONTEXTS, shapes=SHAPES):
    """Return the largest relative error of predicted seconds, over rounds of many shapes."""
    return max(
        abs(clock.cost(context).seconds(lens) / true_cost(context).seconds(lens) - 1)
        for context in contexts
        for lens in shapes
    )


def play_many(clock, num_rounds, contexts=CONTEXTS, noise=0.0, seed=0):
    """Play rounds of 16 requests with random lengths, a seventh of them without drafts."""
    rng = random.Random(seed)
    for number in range(num_rounds):
        lens = [rng.randint(0, 12) if number % 7 else 0 for _ in range(16)]
        play(clock, lens, rng.choice(contexts), slower=rng.gauss(1, noise))


def test_one_round_is_enough_where_the_step_was_measured():
    clock = RoundCostModel(STEP_S, READS)
    assert not clock.has_measured
    play(clock, [8] * 16, 4096)
    assert clock.has_measured
    assert worst_error(clock) < 1e-9
    assert clock.cost(4096).token == pytest.approx(TOKEN_S)


@pytest.mark.parametrize("lens", [[1], [8]])
def test_weights_that_only_the_target_reads_are_no_cost_of_tokens(lens):
    """Or drafts with weights in 4 bits would look as if they did not pay."""
    true = true_cost(4096, step=STEP_S / 2, target_step=STEP_S)
    clock = RoundCostModel(STEP_S / 2, READS, has_plain=True, target_step=STEP_S)
    for _ in range(5):
        play(clock, lens, 4096, cost=true)
    assert clock.cost(4096).token == pytest.approx(TOKEN_S)
    for _ in range(80):
        clock.observe_plain(1, 4096, true.target + true.request)
    assert clock.cost(4096).plain == pytest.approx(1.0, rel=1e-3)
    requests = [RoundRequest(0.95, 32)]
    assert plan_round(requests, clock.cost(4096)) == plan_round(requests, true)
    assert plan_round(requests, true)[0] > 4


def test_rounds_at_whose_end_some_verify_teach_the_same():
    clock = RoundCostModel(STEP_S, READS)
    for number, num_verified in enumerate((3, 0, 16, 1) * 5):
        context = CONTEXTS[number % 3]
        cost = true_cost(context)
        lens = [6] * 16
        # Verified drafts include those of earlier rounds.
        verified = [6 + number] * num_verified
        draft_s = cost.step * 6 + cost.row * sum(lens)
        verify_s = cost.seconds([0] * num_verified) + cost.token * sum(verified)
        clock.observe(
            lens, context, draft_s, verify_s if num_verified else 0.0, verified_lens=verified
        )
    assert worst_error(clock) < 1e-6
    assert clock.verify_s > 0


def test_rounds_of_any_context_predict_those_of_another():
    clock = RoundCostModel(STEP_S, READS)
    play_many(clock, 60, contexts=(1000, 4096, 16384))
    assert worst_error(clock, contexts=(2048, 32768)) < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_noise_averages_out(seed):
    clock = RoundCostModel(STEP_S, READS)
    play_many(clock, 100, noise=0.01, seed=seed)
    assert worst_error(clock) < 0.05


@pytest.mark.parametrize("guess", [1.1, 1.5, 2.0, 100.0])
def test_a_step_guess_that_is_too_large_is_corrected(guess):
    clock = RoundCostModel(guess * STEP_S, READS)
    play_many(clock, 60)
    assert worst_error(clock) < 0.03
    assert clock.cost(0).step == pytest.approx(STEP_S, rel=0.03)


@pytest.mark.parametrize("guess", [0.5, 0.8])
def test_a_step_guess_that_is_too_small_is_corrected_where_contexts_differ(guess):
    clock = RoundCostModel(guess * STEP_S, READS)
    play_many(clock, 60)
    assert worst_error(clock) < 0.12 * (1 - guess) / 0.5


@pytest.mark.parametrize("guess", [0.25, 1.0, 4.0])
def test_whatever_the_guess_rounds_like_those_seen_are_predicted(guess):
    clock = RoundCostModel(guess * STEP_S, READS)
    context = 2048.0
    errors = []
    for number in range(400):
        lens = [6 + (number + i) % 5 for i in range(16)]
        if number > 10:
            errors.append(worst_error(clock, (context,), (lens,)))
        play(clock, lens, context)
        context *= 1.005
    assert max(errors) < 0.1


def test_contexts_that_jump_are_followed():
    clock = RoundCostModel(STEP_S, READS)
    for context in (32768, 512, 16384, 1024):
        for _ in range(15):
            play(clock, [8] * 16, context)
        assert worst_error(clock) < 1e-6


def test_a_changed_machine_is_learnt_anew():
    clock = RoundCostModel(STEP_S, READS)
    play_many(clock, 50)
    rng = random.Random(0)
    for _ in range(60):
        lens = [rng.randint(1, 12) for _ in range(16)]
        play(clock, lens, rng.choice(CONTEXTS), slower=1.5)
    for context, lens in itertools.product(CONTEXTS, SHAPES[1:4]):
        wanted = 1.5 * true_cost(context).seconds(lens)
        assert clock.cost(context).seconds(lens) == pytest.approx(wanted, rel=0.05)


def test_rounds_without_drafts_teach_what_a_token_costs_and_spoil_nothing():
    clock = RoundCostModel(STEP_S, READS)
    for _ in range(5):
        play(clock, [0] * 16, 8192)
    assert not clock.has_measured
    assert clock.draft_step_s == {}
    assert clock.verify_s == pytest.approx(true_cost(8192).seconds([0] * 16))
    assert clock.cost(8192) == RoundCost(STEP_S, 0, 0, 0)
    play(clock, [8] * 16, 8192)
    for context in (2048, 32768):
        for _ in range(20):
            play(clock, [0] * 16, context)
    assert clock.has_measured
    assert worst_error(clock) < 1e-9


def test_steps_without_drafts_that_are_no_verifications():
    """Launches of plain steps may cost nothing while those of verifications do, so each cost is
    learnt separately."""
    clock = RoundCostModel(STEP_S, READS, has_plain=True)
    play(clock, [8] * 16, 8192)
    plain_s = STEP_S + 16 * READS * ROW_S * 8192
    clock.observe_plain(16, 8192, plain_s)
    assert clock.cost(8192).seconds([0] * 16) == pytest.approx(plain_s, rel=0.01)
    for _ in range(80):
        clock.observe_plain(16, 8192, 1.2 * plain_s)
    assert clock.plain_step_s == pytest.approx(1.2 * plain_s)
    assert clock.cost(8192).seconds([0] * 16) == pytest.approx(1.2 * plain_s, rel=1e-3)
    rounds_with_drafts = true_cost(8192).seconds([4] * 16)
    assert clock.cost(8192).seconds([4] * 16) == pytest.approx(rounds_with_drafts)


def test_rounds_that_wait_for_the_cpu_do_not_make_tokens_dear():
    """With short prompts the time to enqueue must not count as the cost of tokens."""
    clock = RoundCostModel(STEP_S, READS, has_plain=True, row_per_token=1.2 * ROW_S)
    for _ in range(5):
        clock.observe([8] * 4, 300, 8 * STEP_S, 24e-3, enqueue_s=8 * STEP_S + 23e-3)
    assert clock.cost(300).token == 0
    assert clock.cost(300).enqueue == pytest.approx(8 * STEP_S + 23e-3)
    requests = [RoundRequest(0.98, 16)] * 16
    assert min(plan_round(requests, clock.cost(32768))) > 4
    play(clock, [8] * 16, 32768)
    assert clock.cost(32768).token == pytest.approx(TOKEN_S, rel=0.1)
    # A lower time of the device bounds the cost.
    clock.observe([8] * 16, 300, 8 * STEP_S, STEP_S, enqueue_s=1.0)
    assert clock.cost(300).token == 0


def test_verifying_alone_is_enqueued_too():
    """After one slow round, the rounds have no drafts. Drafting must not seem to cost what only
    that round took, and rounds without drafts must not seem faster than they are."""
    clock = RoundCostModel(STEP_S, READS)
    requests = [RoundRequest(0.95, 32)] * 16
    cost = true_cost(32768)

    def play_slowly(lens, enqueue_s):
        draft_s = cost.step * max(lens) + cost.row * sum(lens)
        verify_s = max(cost.seconds(lens), enqueue_s) - draft_s
        clock.observe(lens, 32768, draft_s, verify_s, enqueue_s)

    play_slowly([8] * 16, 2.0)
    for _ in range(12):
        play_slowly([0] * 16, 30e-3)
    assert clock.cost(32768).seconds([0] * 16) > 30e-3
    assert clock.cost(32768).enqueue == pytest.approx(2.0 * 0.8**12, rel=0.3)
    assert min(plan_round(requests, clock.cost(32768))) > 4


def test_what_passes_between_rounds_makes_them_longer():
    clock = RoundCostModel(STEP_S, READS)
    requests = [RoundRequest(0.95, 64)] * 16
    for _ in range(3):
        play(clock, [8] * 16, 32768)
    lens = plan_round(requests, clock.cost(32768))
    cost = true_cost(32768)
    draft_s = cost.step * 8 + cost.row * 8 * 16
    for _ in range(20):
        clock.observe([8] * 16, 32768, draft_s, cost.seconds([8] * 16) - draft_s, between_s=50e-3)
    longer = clock.cost(32768)
    assert longer.between == pytest.approx(50e-3, rel=0.05)
    assert longer.token == pytest.approx(TOKEN_S, rel=0.1)
    assert longer.seconds([4] * 16) == pytest.approx(cost.seconds([4] * 16) + 50e-3, rel=0.05)
    assert min(plan_round(requests, longer)) > max(lens)
    # After a prefill the time between rounds is unknown.
    play(clock, [8] * 16, 32768)
    assert clock.cost(32768).between == longer.between


def test_rounds_that_a_prefill_delayed_do_not_stop_drafting():
    """The time of the prefill is unknown here, and no part of the round's time."""
    clock = RoundCostModel(STEP_S, READS, has_plain=True)
    for _ in range(5):
        play(clock, [8] * 16, 32768)
    before = clock.cost(32768)
    requests = [RoundRequest(0.9, 32)] * 16
    wanted = plan_round(requests, before)
    assert min(wanted) > 0
    cost = true_cost(32768)
    draft_s = cost.step * 8 + cost.row * 8 * 16
    verify_s = cost.seconds([8] * 16) - draft_s
    # The CPU was not ahead of the device, so the time of launches is part of the verification's.
    for _ in range(5):
        clock.observe([8] * 16, 32768, draft_s, 2 * verify_s, enqueue_s=None)
    after = clock.cost(32768)
    assert (after.enqueue, after.token) == (before.enqueue, before.token)
    assert plan_round(requests, after) == wanted


def test_a_cpu_that_waited_for_the_device_made_no_draft_free():
    """Enqueuing took most of the time of long rounds, since the device accepts only a limited
    number of launches."""
    clock = RoundCostModel(STEP_S, READS)
    for _ in range(8):
        play(clock, [20] * 16, 32768)
    wanted = clock.cost(32768)
    cost = true_cost(32768)
    draft_s = cost.step * 20 + cost.row * 20 * 16
    verify_s = cost.seconds([20] * 16) - draft_s
    for _ in range(8):
        clock.observe([20] * 16, 32768, draft_s, verify_s, draft_s + 0.5 * verify_s)
    assert clock.cost(32768).enqueue == wanted.enqueue
    # The CPU's own time shows if the device finishes right after the last launch.
    clock.observe([20] * 16, 32768, draft_s, verify_s, draft_s + verify_s)
    assert clock.cost(32768).enqueue == pytest.approx(draft_s + verify_s)
    clock.observe([20] * 16, 32768, draft_s, verify_s, 0.5 * draft_s)
    assert clock.cost(32768).enqueue == pytest.approx(0.5 * draft_s)


@pytest.mark.parametrize("wrong", [0.5, 1.0, 2.0])
def test_a_guessed_slope_counts_until_long_contexts_are_seen(wrong):
    clock = RoundCostModel(STEP_S, READS, row_per_token=wrong * ROW_S)
    for _ in range(20):
        play(clock, [8] * 4, 300)
    assert worst_error(clock, (300,), ([8] * 4,)) < 0.02
    step_s = clock.cost(32768).row * 16 + clock.cost(32768).step
    assert step_s == pytest.approx(STEP_S + wrong * ROW_S * 32768 * 16, rel=0.05)
    for _ in range(20):
        play(clock, [8] * 16, 32768)
    assert worst_error(clock, (32768,), ([8] * 16,)) < 0.02


def test_drafts_are_free_while_a_round_waits_for_the_cpu():
    cost = RoundCost(1e-3, 0.0, 1e-3, 0.0, plain=1.0, enqueue=30e-3)
    lens = plan_round([RoundRequest(0.95, 64)], cost)
    assert lens[0] >= 27
    assert cost.seconds(lens) == pytest.approx(30e-3, rel=0.1)


def test_drafting_stops_where_steps_without_it_are_as_quick():
    """Contexts cost nothing to read here, so a draft step costs as much as a plain step."""
    clock = RoundCostModel(STEP_S, READS, has_plain=True)
    clock.observe([8] * 4, 100, 8 * STEP_S, 3 * STEP_S)
    requests = [RoundRequest(0.95, 16)] * 4
    assert plan_round(requests, clock.cost(100)) == [0] * 4
    # The cost of drafts must be measured again after a while.
    for _ in range(ROUNDS_BEFORE_RETRY):
        assert clock.has_measured
        clock.observe_plain(4, 100, STEP_S)
    assert not clock.has_measured


def test_a_stalled_step_without_drafts_does_not_keep_drafting_forever():
    clock = RoundCostModel(STEP_S, READS, has_plain=True, row_per_token=ROW_S)
    cost, requests = true_cost(1000), [RoundRequest(0.7, 32)] * 4
    play(clock, [8] * 4, 1000)
    assert not any(plan_round(requests, clock.cost(1000)))
    plain_s = cost.seconds([0] * 4) - 4 * cost.token
    clock.observe_plain(4, 1000, 8 * plain_s)
    drafted = 0
    for _ in range(400):
        lens = plan_round(requests, clock.cost(1000))
        if any(lens):
            drafted += 1
            play(clock, lens, 1000)
        else:
            clock.observe_plain(4, 1000, plain_s)
    assert 0 < drafted < 100
    assert not any(plan_round(requests, clock.cost(1000)))


def test_verifications_that_read_faster_than_drafts():
    """By their bytes the verifications would take twice as long."""
    context, lens = 32768, [8] * 16
    clock = RoundCostModel(STEP_S, 2 * READS, has_plain=True)
    for _ in range(30):
        play(clock, lens, context)
    cost, true = clock.cost(context), true_cost(context)
    assert cost.seconds(lens) == pytest.approx(true.seconds(lens), rel=0.01)
    # The cost of tokens cannot be separated from it while their number stays the same.
    assert true.request < cost.request < 1.1 * (true.request + 9 * TOKEN_S)
    # If the kernels change, the estimate follows.
    slow_s = true_cost(context).seconds([0] * 16) + 16 * READS * ROW_S * context
    for _ in range(150):
        clock.observe(lens, context, 8 * (STEP_S + 16 * ROW_S * context), slow_s)
    assert clock.cost(context).request == pytest.approx(2 * READS * ROW_S * context, rel=0.1)


def test_steps_without_drafts_are_tried_again_at_another_context():
    """At the first context launches took half the time, so drafting seemed to pay."""
    context, requests = 32768, [RoundRequest(0.98, 32)]
    # A request reads its context slowly while it drafts.
    row_s = 1.3e-3
    plain_s = STEP_S + 1.2e-3
    clock = RoundCostModel(STEP_S, READS, has_plain=True)
    clock.observe_plain(1, 100, STEP_S)
    drafted = 0
    for _ in range(200):
        lens = plan_round(requests, clock.cost(context))
        if not any(lens):
            clock.observe_plain(1, context, plain_s)
            continue
        drafted += 1
        clock.observe(lens, context, lens[0] * (STEP_S + row_s), STEP_S + 2.5e-3)
    assert drafted < 80
    cost = clock.cost(context)
    assert cost.seconds([0]) == pytest.approx(plain_s, rel=0.02)


def test_means_that_are_reported():
    clock = RoundCostModel(STEP_S, READS)
    for _ in range(40):
        play(clock, [4, 2], 2048)
    assert clock.draft_step_s == {2: pytest.approx(STEP_S + ROW_S * 2048 * 6 / 4)}
    assert clock.verify_s == pytest.approx(STEP_S + 2 * READS * ROW_S * 2048 + 8 * TOKEN_S)


@pytest.mark.parametrize(
    "rounds",
    [
        [([1], 0.0, 0.0, 0.0), ([3, 0], 0.0, 1e-9, 5.0), ([], 0.0, 0.0, 1.0)],
        [([9] * 4, 1e6, 1e-6, 0.0), ([1], 10.0, 50.0, 1e-6)],
        # Time that grows faster than the bytes read: a straight line would begin below 0.
        [([1], 1000.0, 1e-4, 0.1), ([1], 2000.0, 1.0, 0.1)],
    ],
    ids=["nothing", "falling", "steep"],
)
def test_costs_are_never_negative_nor_infinite(rounds):
    clock = RoundCostModel(1.0, READS)
    for number in range(10):
        clock.observe(*rounds[number % len(rounds)])
        cost = clock.cost(1000.0)
        assert all(0 <= part < 1e3 for part in (cost.step, cost.row, cost.request, cost.token))


def auto_lens(clock, context):
    """Return lengths as the worker does: a fixed length until drafts were measured."""
    if not clock.has_measured:
        return [8] * 16
    return plan_round([RoundRequest(0.95, 32)] * 16, clock.cost(context))


def test_costs_of_a_short_context_do_not_stop_drafting_over_long_ones_for_good():
    # With a step guess slightly too large, rows seem free over a short context. Then no drafts are
    # made that could correct this.
    clock = RoundCostModel(1.02 * STEP_S, READS)
    play(clock, auto_lens(clock, 64), 64)
    assert clock.cost(64).row == 0
    wanted = plan_round([RoundRequest(0.95, 32)] * 16, true_cost(32768))
    assert any(wanted)
    play(clock, auto_lens(clock, 32768), 32768)
    assert not any(auto_lens(clock, 32768))
    for _ in range(ROUNDS_BEFORE_RETRY + 40):
        play(clock, auto_lens(clock, 32768), 32768)
    assert auto_lens(clock, 32768) == wanted
    assert worst_error(clock) < 0.01


def test_a_slow_draft_is_forgotten_when_drafts_are_tried_again():
    clock = RoundCostModel(STEP_S, READS)
    clock.observe([8] * 16, 8192, 20.0, true_cost(8192).seconds([0] * 16))
    for _ in range(ROUNDS_BEFORE_RETRY):
        assert clock.has_measured
        play(clock, [0] * 16, 8192)
    assert not clock.has_measured
    play(clock, [8] * 16, 8192)
    assert clock.has_measured
    learnt, true = clock.cost(8192), true_cost(8192)
    assert (learnt.step, learnt.row) == pytest.approx((true.step, true.row))


def test_the_rounds_of_a_last_request_do_not_stop_drafts_of_the_next_batch():
    """A verification of one request takes longer than its share of a batch's, and its last one has
    no drafts. Divided by its only token, that time would make drafts seem dear."""
    clock = RoundCostModel(STEP_S, READS, has_plain=True, row_per_token=ROW_S)
    context, alone_s = 32768, STEP_S
    wanted = plan_round([RoundRequest(0.95, 32)] * 16, true_cost(context))
    assert any(wanted)

    def play_alone(num_drafts):
        cost = true_cost(context)
        draft_s = num_drafts * (cost.step + cost.row)
        clock.observe(
            [num_drafts], context, draft_s, cost.seconds([num_drafts]) - draft_s + alone_s
        )

    def play_batch():
        """Play a round of 16 requests. Return True if they drafted."""
        lens = auto_lens(clock, context)
        if any(lens):
            play(clock, lens, context)
        else:
            clock.observe_plain(16, context, true_cost(context).seconds(lens))
        return any(lens)

    for _ in range(10):
        play_batch()
    for num_drafts in (8, 8, 2, 1, 0, 0, 0):
        play_alone(num_drafts)
    # Steps without drafts may be tried, too, since nothing was known of their cost.
    assert sum(play_batch() for _ in range(10)) >= 8
    for _ in range(20):
        play_batch()
    assert clock.cost(context).token == pytest.approx(TOKEN_S, rel=0.1)


def test_where_drafts_never_pay_they_are_tried_rarely():
    clock = RoundCostModel(STEP_S, READS)
    tried = 0
    for _ in range(4 * ROUNDS_BEFORE_RETRY):
        lens = auto_lens(clock, 100)
        tried += any(lens)
        play(clock, lens, 100)
    assert 3 <= tried <= 4


def test_time_of_piggyback_drafts_is_not_counted_as_that_of_verified_tokens():
    clock = RoundCostModel(STEP_S, READS, piggyback=True)
    play(clock, [8] * 16, 4096)
    cost = true_cost(4096)
    for _ in range(30):
        draft_s = cost.step * 4 + cost.row * 64
        verify_s = cost.seconds([0] * 3) + cost.token * 36 + 13 * cost.row
        clock.observe([4] * 16, 4096, draft_s, verify_s, 0.0, [12] * 3, num_piggyback=13)
    assert clock.cost(4096).token == pytest.approx(TOKEN_S)
    assert clock.cost(4096).piggyback
