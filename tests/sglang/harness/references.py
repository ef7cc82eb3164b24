"""What an identity run compares with: plain SGLang, or the same server with drafting off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.progress import Progress
from harness.prompts import cut_prompts
from harness.reference_cache import ReferenceCache
from harness.scenarios import ALONE, Scenario
from harness.servers import Announce, ServerSpec, ServerSwitch
from harness.suite import Answers, Suite, suite_around, tasks_of

_POOL = "--max-total-tokens=24576"
# A prefill is then never cut by what happened to wait beside it, which the int8 target would show.
_WHOLE_PREFILLS = "--chunked-prefill-size=-1"

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """A model, and prompts of which lengths it answers with how many tokens."""

    model: Path
    lengths: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Setting:
    """What --kvspec is asked for."""

    target: str
    codec: str

    def __str__(self) -> str:
        return f"{self.target}-{self.codec}"

    def server(self, model: Path, *more: str) -> ServerSpec:
        flags = ("--kvspec", f"--kvspec-target={self.target}", f"--kvspec-codec={self.codec}")
        cut = () if self.target == "exact" else (_WHOLE_PREFILLS,)
        return ServerSpec(model, (_POOL, *cut, *flags, *more))


class Reference(Protocol):
    """A suite, and the right answers to it."""

    suite: Suite
    baseline: str

    def expected(self, scenario: Scenario, answers: Answers) -> list[TokenIds]:
        """The right output for each of `answers`, in their order."""
        ...


class PlainReference:
    """Plain SGLang, every request alone: right for the exact target in every scenario."""

    baseline = "plain SGLang, one request at a time"

    def __init__(
        self,
        servers: ServerSwitch,
        workload: Workload,
        announce: Announce,
        cache_folder: Path | None = None,
    ) -> None:
        plain = ServerSpec(workload.model, (_POOL,))
        client, cache = servers.use(plain), ReferenceCache(cache_folder, plain.label)
        progress = Progress(f"{workload.model.name} plain", announce)
        prompts = cut_prompts(workload.model, workload.lengths)
        answers = cache.answer(client, tasks_of(prompts, workload.max_new_tokens), progress.done)
        self.suite = suite_around(answers)
        answers += cache.answer(client, self.suite.relatives, progress.done)
        self._output_of = {task.input_ids: output.output_ids for task, output in answers}

    def expected(self, scenario: Scenario, answers: Answers) -> list[TokenIds]:
        return [self._output_of[task.input_ids] for task, _ in answers]


class UndraftedReference:
    """The same server and the same scenario with `--kvspec-draft-len 0`: right for any target.

    Runs every scenario it will be asked for when it is built, so that servers change rarely.
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
        prompts = cut_prompts(workload.model, workload.lengths)
        spec = ALONE.server(undrafted)
        client, cache = servers.use(spec), ReferenceCache(cache_folder, spec.label)
        progress = Progress(f"{workload.model.name} {setting} undrafted", announce)
        alone = cache.answer(client, tasks_of(prompts, workload.max_new_tokens), progress.done)
        self.suite = suite_around(alone)
        self._outputs_of = {ALONE.name: _outputs(alone)}
        for scenario in scenarios:
            if scenario.name not in self._outputs_of:
                client = servers.use(scenario.server(undrafted))
                answers = scenario.run(client, self.suite, progress.done)
                self._outputs_of[scenario.name] = _outputs(answers)

    def expected(self, scenario: Scenario, answers: Answers) -> list[TokenIds]:
        return self._outputs_of[scenario.name]


def _outputs(answers: Answers) -> list[TokenIds]:
    return [output.output_ids for _, output in answers]
