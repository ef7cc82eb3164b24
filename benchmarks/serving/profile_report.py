"""Report of a profile: figures, the JSON that holds them, and a table on the console."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from acceptance.report import Estimate, Figure, write_json
from rich.table import Table

from serving.breakdown import Breakdown
from serving.profiled_run import ProfiledRun
from serving.report import note_on
from serving.trace_rounds import Phase, Round

# Names of phases in sentences, and then in the names of figures.
DRAFTING = {Phase.STEPS: "drafting", Phase.REST: "verifying and housekeeping"}
PLAIN = {Phase.STEPS: "decode step", Phase.REST: "between decode steps"}
_DRAFTING_KEYS = {Phase.STEPS: "draft", Phase.REST: "verify"}
_PLAIN_KEYS = {Phase.STEPS: "step", Phase.REST: "between"}


class ProfileReport:
    """Report of a run and its breakdown. bandwidth: bandwidth of the floor in bytes/s."""

    def __init__(self, run: ProfiledRun, breakdown: Breakdown, bandwidth: float) -> None:
        self._run, self._breakdown, self._bandwidth = run, breakdown, bandwidth
        self._keys = _PLAIN_KEYS if run.target is None else _DRAFTING_KEYS
        self._note = note_on({run.acceptance}, run.acceptance_source)

    @property
    def slowdown(self) -> float:
        """Return how many times as long a round takes with the profiler."""
        return self._round_ms().mean / self._run.iteration_ms

    def losses(self) -> list[str]:
        breakdown = self._breakdown
        return [breakdown.sentence(loss) for loss in breakdown.largest_losses()]

    def figures(self) -> list[Figure]:
        """Return all figures of the point and system. Baselines are floors, in the figure's own
        unit."""
        run, found = self._run, self._breakdown
        drafting = run.target is not None
        floors = {phase: self._floor_of(phase) for phase in Phase}
        figures = [
            self._figure("rounds", len(found.rounds), "profiled rounds"),
            self._figure("round_ms", self._round_ms(), "ms", sum(floors.values())),
            self._figure("round_unprofiled_ms", run.iteration_ms, "ms, median at the client"),
            self._figure("idle_ms", found.over_rounds(_idle_ms), "ms a round", 0.0),
        ]
        if drafting:
            steps = found.over_rounds(lambda round: len(round.steps))
            step_ms = found.over_rounds(lambda round: round.step_us / 1e3)
            floor = floors[Phase.STEPS] / steps.mean
            figures += [
                self._figure("draft_steps", steps, "a round"),
                self._figure("draft_step_ms", step_ms, "ms, gaps included", floor),
                *(
                    self._figure(f"server.{name}", ms, "ms, measured by the server before")
                    for name, ms in run.server_timing.items()
                ),
                self._figure("drafted", self._per_verification("drafted"), "a verification"),
                self._figure("accepted", self._per_verification("accepted"), "a verification"),
            ]
        for phase in Phase:
            busy = found.over_rounds(lambda round, p=phase: round.busy_us(p) / 1e3)
            name = f"{self._keys[phase]}.gpu_ms"
            figures.append(self._figure(name, busy, "ms a round", floors[phase]))
        for (phase, category), value in found.measured_ms().items():
            name = f"{self._keys[phase]}.{re.sub(r'[^a-z]+', '_', category)}_ms"
            floor = found.floor.get((phase, category), 0.0)
            figures.append(self._figure(name, value, "ms a round", floor))
        return figures

    def write(self, path: Path) -> None:
        """Write the JSON to `path`."""
        run, found = self._run, self._breakdown
        settings = {
            "acceptance": self._note,
            "largest_gaps_to_the_floor": self.losses(),
            "floor": (
                "time to read weights once a step, anchors once a draft step and the target's "
                f"records once a verification, at {self._bandwidth / 1e12:.2f} TB/s; nothing else"
            ),
            "arithmetic_ms": {
                f"{self._keys[phase]}.{category}": round(ms, 3)
                for (phase, category), ms in found.arithmetic.items()
            },
            "spread": "95% half width over rounds",
            "phases": (
                "kernels of replayed CUDA graphs are "
                + ("draft steps" if run.target else "decode steps")
                + ", all other kernels are verification and housekeeping"
            ),
            "profiler": f"with the profiler, a round takes {self.slowdown:.2f} times as long",
            "not_in_any_category": found.other_kernels(),
            "idle_between": found.idle_texts(),
            "unknown": found.missing(),
            "point": run.label,
            "system": run.system,
            "codec": run.codec if run.target else None,
            "requests": run.requests,
            "context_len": run.context_len,
            "prompt_len": run.prompt_len,
            "output_len": run.output_len,
            "start_s": run.start_s,
            "kvspec": run.kvspec_config,
            "server_arguments": run.server_arguments,
        }
        write_json(
            path,
            "profile",
            torch.device("cpu"),
            settings,
            self.figures(),
            machine=run.machine,
            commit=run.commit,
            measured_with=run.versions,
        )

    def console(self) -> Iterator[str | Table]:
        """Yield what to print, the note on acceptance first."""
        run, found = self._run, self._breakdown
        yield self._note
        table = Table(
            title=f"{run.label} {run.system}, mean of {len(found.rounds)} rounds ({self._note})",
            title_justify="left",
        )
        table.add_column("")
        for heading in ("ms a round", "floor", "times the floor"):
            table.add_column(heading, justify="right")
        for phase in Phase:
            for (own, category), value in found.measured_ms().items():
                if own is phase:
                    floor = found.floor.get((phase, category), 0.0)
                    table.add_row(f"{self._keys[phase]}: {category}", *_cells(value, floor))
            table.add_section()
        table.add_row("the whole round", *_cells(self._round_ms(), sum(found.floor.values())))
        if run.target is not None:
            steps = found.over_rounds(lambda round: len(round.steps)).mean
            step_ms = found.over_rounds(lambda round: round.step_us / 1e3)
            floor = self._floor_of(Phase.STEPS) / steps
            table.add_row(f"a draft step ({steps:.1f} in a round)", *_cells(step_ms, floor))
        yield table
        yield (
            f"with the profiler, a round takes {self.slowdown:.2f} times as long as the "
            f"{run.iteration_ms:.2f} ms without the profiler"
        )
        yield "largest gaps to the floor:"
        yield from (f"  {text}" for text in self.losses())
        yield "longest idle times:"
        yield from (f"  {text}" for text in found.idle_texts())
        yield "kernels without a category:"
        yield from (f"  {text}" for text in found.other_kernels())
        yield from found.missing()

    def _figure(
        self, name: str, value: Estimate | float, unit: str, baseline: float | None = None
    ) -> Figure:
        full = f"profile.{self._run.label}.{self._run.system}.{name}"
        if not isinstance(value, Estimate):
            return Figure(full, value, unit, None, baseline)
        spread = value.half_width if len(self._breakdown.rounds) > 1 else None
        return Figure(full, value.mean, unit, spread, baseline)

    def _round_ms(self) -> Estimate:
        return self._breakdown.over_rounds(lambda round: round.us / 1e3)

    def _floor_of(self, phase: Phase) -> float:
        return sum(ms for (own, _), ms in self._breakdown.floor.items() if own is phase)

    def _per_verification(self, counter: str) -> float:
        counters = self._run.counters
        return float(counters.get(counter, 0) / counters["verifications"])


def _idle_ms(round: Round) -> float:
    return sum(round.idle_us(phase) for phase in Phase) / 1e3


def _cells(value: Estimate, floor: float) -> list[str]:
    if not floor:
        return [f"{value.mean:.2f}", "", ""]
    return [f"{value.mean:.2f}", f"{floor:.2f}", f"{value.mean / floor:.2f}"]
