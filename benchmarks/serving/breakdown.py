"""Breakdown of a round's time, compared with the floor, and the largest gaps between both."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

import torch
from acceptance.report import Estimate

from serving.floor import Place
from serving.kernel_names import OTHER, short_name
from serving.trace import Gap
from serving.trace_rounds import Phase, Round

IDLE = "idle"
# Most kernels that a sentence names, and most entries of a list.
MOST_KERNELS, MOST_LISTED = 3, 8


@dataclass(frozen=True, slots=True)
class Loss:
    """Time of one phase and category above its floor, in milliseconds a round."""

    place: Place
    measured_ms: float
    floor_ms: float

    @property
    def ms(self) -> float:
        return self.measured_ms - self.floor_ms


class Breakdown:
    """Means over rounds. floor, arithmetic: milliseconds a round by phase and category."""

    def __init__(
        self,
        rounds: Sequence[Round],
        floor: Mapping[Place, float],
        arithmetic: Mapping[Place, float],
        phase_names: Mapping[Phase, str],
    ) -> None:
        """Create a breakdown. phase_names: names of phases in sentences, such as "drafting"."""
        self.rounds, self.floor, self.arithmetic = rounds, floor, arithmetic
        self._names = phase_names

    def over_rounds(self, ms_or_count: Callable[[Round], float]) -> Estimate:
        return _mean([ms_or_count(round) for round in self.rounds])

    def measured_ms(self) -> dict[Place, Estimate]:
        """Return the time by phase and category, IDLE included. In each phase, the longest comes
        first and IDLE last."""
        times = [round.category_us() for round in self.rounds]
        found = {
            place: _mean([time.get(place, 0.0) / 1e3 for time in times])
            for place in {place for time in times for place in time}
        }
        ordered = sorted(found.items(), key=lambda item: (item[0][0] is Phase.REST, -item[1].mean))
        result: dict[Place, Estimate] = {}
        for phase in Phase:
            result |= {place: value for place, value in ordered if place[0] is phase}
            result[phase, IDLE] = self.over_rounds(lambda r, p=phase: r.idle_us(p) / 1e3)
        return result

    def largest_losses(self, count: int = 3) -> list[Loss]:
        """Return the largest losses, the largest first."""
        losses = [
            Loss(place, value.mean, self.floor.get(place, 0.0))
            for place, value in self.measured_ms().items()
        ]
        return nlargest(count, losses, key=lambda loss: loss.ms)

    def kernels_ms(self, phase: Phase, category: str) -> list[tuple[str, float]]:
        """Return short names of kernels with milliseconds a round, the largest first."""
        found: Counter[str] = Counter()
        for round in self.rounds:
            for name, us in round.kernels_us(phase, category).items():
                found[short_name(name)] += us  # type: ignore[assignment]
        return [(name, us / 1e3 / len(self.rounds)) for name, us in found.most_common()]

    def gaps(self, phase: Phase) -> list[Gap]:
        """Return the gaps of all rounds."""
        return [gap for round in self.rounds for gap in round.gaps(phase)]

    def sentence(self, loss: Loss) -> str:
        """Describe the time above the floor in one sentence."""
        phase, category = loss.place
        head = f"{self._names[phase]}, {category}: {loss.measured_ms:.2f} ms a round"
        if category == IDLE:
            return f"{head} in which nothing runs on the GPU, in {self._gap_words(phase)}."
        named = ", ".join(
            f"{name} {ms:.2f}" for name, ms in self.kernels_ms(phase, category)[:MOST_KERNELS]
        )
        if not loss.floor_ms:
            return f"{head}, all above a floor that counts weights and KV alone ({named})."
        text = (
            f"{head}, {loss.ms:.2f} ms above the byte floor of {loss.floor_ms:.2f} ms, "
            f"{loss.measured_ms / loss.floor_ms:.2f} times this floor"
        )
        if loss.place in self.arithmetic:
            text += (
                "; the arithmetic takes "
                f"{self.arithmetic[loss.place]:.2f} ms at the published speed"
            )
        return f"{text} ({named})."

    def missing(self) -> list[str]:
        """Return the places of the floor for which no kernel was found: kernel_names.py may not
        know their kernels."""
        found = {place for round in self.rounds for place in round.category_us()}
        return [
            f"{self._names[phase]}: no kernel was found in the category {category!r}"
            for phase, category in self.floor
            if (phase, category) not in found
        ]

    def other_kernels(self) -> list[str]:
        """Describe kernels without a category, with their phase, the largest first."""
        found = [
            (ms, f"{self._names[phase]}: {name} {ms:.3f} ms a round")
            for phase in Phase
            for name, ms in self.kernels_ms(phase, OTHER)
        ]
        return [text for _, text in nlargest(MOST_LISTED, found)]

    def idle_texts(self) -> list[str]:
        """Describe idle time. Gaps between the same two kernels count together; the most time comes
        first."""
        found: defaultdict[tuple[Phase, str, str], list[float]] = defaultdict(list)
        for phase in Phase:
            for gap in self.gaps(phase):
                found[phase, short_name(gap.after), short_name(gap.before)].append(gap.us / 1e3)
        most = nlargest(MOST_LISTED, found.items(), key=lambda item: sum(item[1]))
        count = len(self.rounds)
        return [
            f"{self._names[phase]}: {sum(ms) / count:.3f} ms a round between {after} and {before}, "
            f"in {len(ms) / count:.1f} gaps of {max(ms):.3f} ms at most"
            for (phase, after, before), ms in most
        ]

    def _gap_words(self, phase: Phase) -> str:
        found = self.gaps(phase)
        if not found:
            return "no gaps"
        gap = max(found, key=lambda gap: gap.us)
        return (
            f"{len(found) / len(self.rounds):.0f} gaps, the largest of {gap.us / 1e3:.2f} ms "
            f"between {short_name(gap.after)} and {short_name(gap.before)}"
        )


def _mean(samples: Sequence[float]) -> Estimate:
    return Estimate.of(torch.tensor(samples, dtype=torch.float64))
