"""The requests of an identity run: prompts, and relatives that share a prefix with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.client import GenerateClient, Output
from harness.prompts import Prompt

# Enough for a few full pages on either side of the point where prompts part.
_RELATED_MIN_LEN = 384
_SUFFIX_LEN = 48
_CONTINUE_AFTER = 80

OnDone = Callable[[], None]


@dataclass(frozen=True)
class Task:
    """One request; `name` is for people."""

    name: str
    input_ids: tuple[int, ...]
    max_new_tokens: int


Answers = list[tuple[Task, Output]]


@dataclass(frozen=True)
class Family:
    """A prompt, and tasks that share a prefix with it: one parts from it after two thirds; one
    is a next turn, prompt and start of the answer and new text, so that a hit covers generated
    tokens. A short prompt has no relatives."""

    prompt: Task
    relatives: tuple[Task, ...]


@dataclass(frozen=True)
class Suite:
    """What the scenarios of one model send."""

    families: tuple[Family, ...]

    @property
    def prompts(self) -> tuple[Task, ...]:
        return tuple(family.prompt for family in self.families)

    @property
    def relatives(self) -> tuple[Task, ...]:
        return tuple(task for family in self.families for task in family.relatives)


def run_one_by_one(client: GenerateClient, tasks: Sequence[Task], on_done: OnDone) -> Answers:
    """Every task alone on the server, in order."""
    answers = []
    for task in tasks:
        answers.append((task, client.generate(task.input_ids, task.max_new_tokens)))
        on_done()
    return answers


def tasks_of(prompts: Sequence[Prompt], max_new_tokens: int) -> tuple[Task, ...]:
    return tuple(
        Task(f"{prompt.name}[:{len(prompt.input_ids)}]", prompt.input_ids, max_new_tokens)
        for prompt in prompts
    )


def suite_around(answers: Answers) -> Suite:
    """The suite of tasks that the reference server has answered: next turns need its answers."""
    families = []
    for place, (task, answer) in enumerate(answers):
        # The tail of another prompt: text like any, and a branch no other family shares.
        suffix = answers[place - 1][0].input_ids[-_SUFFIX_LEN:]
        families.append(Family(task, _relatives(task, answer, suffix)))
    return Suite(tuple(families))


def _relatives(task: Task, answer: Output, suffix: tuple[int, ...]) -> tuple[Task, ...]:
    if len(task.input_ids) < _RELATED_MIN_LEN:
        return ()
    kept = len(task.input_ids) * 2 // 3
    turn = task.input_ids + answer.output_ids[:_CONTINUE_AFTER] + suffix
    return (
        Task(f"{task.name} parted at {kept}", task.input_ids[:kept] + suffix, task.max_new_tokens),
        Task(f"{task.name} and a next turn", turn, task.max_new_tokens),
    )
