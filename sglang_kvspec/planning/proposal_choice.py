"""Choice of a batch's next draft step, with or without proposals, by expected tokens a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_kvspec.planning.draft_length import expected_tokens

# Choices besides a number of tokens: end the drafts of the round, or take ordinary steps to its
# end, which follow one another without the CPU.
STOP, ORDINARY = 0, 1


@dataclass(frozen=True, slots=True)
class Drafting:
    """A request in the middle of its drafts. drafts, goal: drafts that it has, and is to have.
    num_proposed, probability: tokens that could be proposed to its next step, and that each becomes
    a draft if those before it do. acceptance: probability that the target accepts a draft."""

    drafts: int
    goal: int
    num_proposed: int
    probability: float
    acceptance: float

    @property
    def missing(self) -> int:
        """Drafts that are yet to be made."""
        return max(self.goal - self.drafts, 0)

    def gain(self, width: int) -> float:
        """Return the drafts that a step of so many tokens is expected to make."""
        return expected_tokens(self.probability, min(self.num_proposed, width - 1))

    def tokens(self, drafts: float) -> float:
        """Return the tokens that a verification of so many drafts is expected to emit."""
        return float(1 - self.acceptance ** (drafts + 1)) / (1 - self.acceptance)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Expected seconds, of a batch of one size. ordinary: a draft step that the CPU does not wait
    for. load: to begin steps of another kind. wide: a step with proposals that the CPU waits for,
    with all that the CPU does for it, by its tokens a request. rest: all of a round behind
    ordinary steps. waited_rest: all of a round behind a step that the CPU waited for; greater,
    because the CPU's own work then overlaps with no drafts."""

    ordinary: float
    load: float
    wide: Mapping[int, float]
    rest: float
    waited_rest: float


def choose_step(
    requests: Sequence[Drafting], spent_s: float, times: StepTimes, *, always: bool = False
) -> int:
    """Return the tokens of a request in the next draft step, ORDINARY, or STOP.

    The choice is the start of the way through the round with the most expected tokens a second of
    the whole batch. So requests to which little is proposed make fewer drafts in the round, where
    the others gain more by that. spent_s: seconds since the round's drafts were begun. always: take
    the best step with proposals, if there are any.
    """
    has_proposals = any(each.num_proposed and each.missing for each in requests)
    is_begun = spent_s > 0
    # Ordinary steps have theirs in `rest`, unless they follow others.
    begin_s = 0.0 if is_begun else times.load
    most = max(each.missing for each in requests)

    def rate(drafts: Sequence[float], seconds: float) -> float:
        pairs = zip(requests, drafts, strict=True)
        tokens = sum(each.tokens(count) for each, count in pairs)
        return tokens / (spent_s + seconds)

    rates: dict[int, float] = {}
    if not (always and has_proposals):
        load_s = times.load if is_begun else 0.0
        goals = [max(each.goal, each.drafts) for each in requests]
        rates[ORDINARY] = rate(goals, load_s + most * times.ordinary + times.rest)
        if is_begun:
            rates[STOP] = rate([each.drafts for each in requests], times.waited_rest)
    if has_proposals:
        # A step has the least width with room for its tokens. Wider ones would make no more drafts,
        # and the time of another step would be taken for theirs.
        tokens = 1 + max(each.num_proposed for each in requests)
        widest = min((width for width in times.wide if width >= tokens), default=tokens)
        for width, step_s in times.wide.items():
            if width > widest:
                continue
            gains = [each.gain(width) for each in requests]
            rates[width] = max(
                rate(drafts, begin_s + seconds)
                for drafts, seconds in _ways(requests, gains, step_s, times)
            )
    # max() takes the first of equal choices: ordinary steps.
    return max(rates, key=lambda choice: rates[choice])


def _ways(
    requests: Sequence[Drafting], gains: Sequence[float], step_s: float, times: StepTimes
) -> Iterator[tuple[list[float], float]]:
    """Yield the drafts and the seconds of each way that begins with a step of these gains: the
    round ends once a request has all its drafts, or ordinary steps follow the first step."""
    pairs = list(zip(requests, gains, strict=True))
    for steps in sorted({-(-each.missing // gain) for each, gain in pairs if each.missing}):
        drafts = [min(each.drafts + steps * gain, each.goal) for each, gain in pairs]
        yield drafts, steps * step_s + times.waited_rest
    left = max(each.missing - gain for each, gain in pairs)
    if left > 0:
        seconds = step_s + times.load + left * times.ordinary + times.rest
        yield [float(max(each.goal, each.drafts)) for each in requests], seconds
