"""References of an identity run: plain SGLang, or the same server with drafting off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness.comparison import compare
from harness.feature_answers import PLAIN
from harness.progress import Progress
from harness.prompts import cut_prompts
from harness.reference_cache import ReferenceCache
from harness.scenarios import ALONE, Scenario
from harness.servers import Announce, ServerSpec, ServerSwitch
from harness.shard import WHOLE, Shard
from harness.suite import Answers, Suite, Task, TokenIds, families_of, tasks_of

_POOL = "--max-total-tokens=24576"
# Whole prefills: a cut that depends on other requests would change answers at the int8 target.
_WHOLE_PREFILLS = "--chunked-prefill-size=-1"


@dataclass(frozen=True)
class Workload:
    """A model, the lengths of its prompts, the length of answers, and the share of prompts to
    run."""

    model: Path
    lengths: tuple[int, ...]
    max_new_tokens: int
    shard: Shard = WHOLE

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Return all prompts, also those of other shards."""
        return tasks_of(cut_prompts(self.model, self.lengths), self.max_new_tokens)


@dataclass(frozen=True)
class Setting:
    """Values of the --kvspec flags."""

    target: str
    codec: str
    schedule: str = "staggered"
    view: str = "all"
    weights: str = "target"
    drafter: str = "self"

    def __str__(self) -> str:
        view = "" if self.view == "all" else f"-{self.view}"
        weights = "" if self.weights == "target" else f"-{Path(self.weights).name}"
        drafter = "" if self.drafter == "self" else f"-{self.drafter}"
        return f"{self.target}-{self.codec}-{self.schedule}{view}{weights}{drafter}"

    def server(self, model: Path, *more: str) -> ServerSpec:
        flags = ("--kvspec", f"--kvspec-target={self.target}", f"--kvspec-codec={self.codec}")
        cut = () if self.target == "exact" else (_WHOLE_PREFILLS,)
        schedule = f"--kvspec-schedule={self.schedule}"
        view = f"--kvspec-draft-view={self.view}"
        weights = (f"--kvspec-draft-weights={self.weights}",)
        if self.weights != "target":
            # On a CPU these drafts cost more than they save.
            weights += ("--kvspec-draft-len=8",)
        drafter = () if self.drafter == "self" else (f"--kvspec-drafter={self.drafter}",)
        return ServerSpec(model, (_POOL, *cut, *flags, schedule, view, *weights, *drafter, *more))


class Reference(Protocol):
    """A suite, and the right answers to it."""

    suite: Suite
    baseline: str

    def expected(self, scenario: Scenario, answers: Answers) -> list[TokenIds]:
        """Return the right output for each of `answers`, in their order."""
        ...


class PlainReference:
    """SGLang without --kvspec, one request at a time. These answers are right for every `exact`
    scenario."""

    baseline = "plain SGLang, one request at a time"

    def __init__(
        self,
        servers: ServerSwitch,
        workload: Workload,
        scenarios: Sequence[Scenario],
        announce: Announce,
        cache_folder: Path | None = None,
    ) -> None:
        plain = replace(PLAIN, model=workload.model)
        cache = ReferenceCache(cache_folder, plain.label)
        progress = Progress(f"{workload.model.name} plain", announce)
        self._output_of: dict[TokenIds, TokenIds] = {}

        def learn(tasks: Sequence[Task]) -> None:
            new = [task for task in tasks if task.input_ids not in self._output_of]
            answers = cache.answer(lambda: servers.use(plain), new, progress.done)
            self._output_of |= {task.input_ids: output.output_ids for task, output in answers}

        tasks = workload.tasks
        self.suite = Suite(workload.shard.of(tasks))
        learn(self.suite.prompts)
        if any(scenario.with_families for scenario in scenarios):
            families = families_of(tasks, self._output_of)
            self.suite = Suite(self.suite.prompts, families)
            learn([family.follower for family in families])

    def expected(self, scenario: Scenario, answers: Answers) -> list[TokenIds]:
        return [self.answer(task) for task, _ in answers]

    def answer(self, task: Task) -> TokenIds:
        # A longer greedy answer begins with the shorter one.
        return self._output_of[task.input_ids][: task.max_new_tokens]

    def check(self, answers: Answers) -> None:
        """Raise AssertionError if an answer differs from plain SGLang's."""
        mismatches = compare(answers, [self.answer(task) for task, _ in answers])
        assert not mismatches, "\n".join(map(str, mismatches))


class UndraftedReference:
    """Answers of a server and scenario with `--kvspec-draft-len 0`. They are right for any target.

    The constructor runs every scenario that will be needed, so that servers change rarely. Settings
    that only check the server, its environment, are left out, so that such scenarios share one run.
    """

    baseline = "the same server with --kvspec-draft-len 0, same scenario"

    def __init__(
        self,
        servers: ServerSwitch,
        workload: Workload,
        setting: Setting,
        scenarios: Sequence[Scenario],
        announce: Announce,
        cache_folder: Path | None = None,
    ) -> None:
        undrafted = setting.server(workload.model, "--kvspec-draft-len=0")
        progress = Progress(f"{workload.model.name} {setting} undrafted", announce)
        self._outputs_of: dict[Scenario, list[TokenIds]] = {}
        tasks = workload.tasks
        self.suite = Suite(workload.shard.of(tasks))
        with_families = any(scenario.with_families for scenario in scenarios)
        if with_families or ALONE in scenarios:
            spec = ALONE.server(undrafted)
            cache = ReferenceCache(cache_folder, spec.label)
            alone = cache.answer(lambda: servers.use(spec), self.suite.prompts, progress.done)
            self._outputs_of[ALONE] = _outputs(alone)
            answer_of = {task.input_ids: output.output_ids for task, output in alone}
            families = families_of(tasks, answer_of) if with_families else ()
            self.suite = Suite(self.suite.prompts, families)
        for scenario in map(_unchecked, scenarios):
            if scenario not in self._outputs_of:
                client = servers.use(scenario.server(undrafted))
                answers = scenario.run(client, self.suite, progress.done)
                self._outputs_of[scenario] = _outputs(answers)

    def expected(self, scenario: Scenario, answers: Answers) -> list[TokenIds]:
        return self._outputs_of[_unchecked(scenario)]


def _unchecked(scenario: Scenario) -> Scenario:
    """Return the part of a repeatable scenario that decides its answers. Scenarios that differ only
    in name and checks share it."""
    assert scenario.repeatable, f"{scenario.name} has no answers of its own to compare with"
    return replace(ALONE, drive=scenario.drive, arguments=scenario.arguments)


def _outputs(answers: Answers) -> list[TokenIds]:
    return [output.output_ids for _, output in answers]
