"""The requests of an identity run: prompts, and pairs of requests that share a prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.client import GenerateClient, Output
from harness.prompts import Prompt

# Enough for a few full pages on either side of the point where prompts part.
_RELATED_MIN_LEN = 384
_SUFFIX_LEN = 48
_CONTINUE_AFTER = 80
# What a leader answers: a few drafts' worth, so that its follower arrives meanwhile where requests
# are staggered; before a next turn, as much of the answer as that continues, and a little more.
_LEADER_NEW_TOKENS = 32
_CONTINUED_NEW_TOKENS = _CONTINUE_AFTER + 16

OnDone = Callable[[], None]
TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """One request; `name` is for people."""

    name: str
    input_ids: TokenIds
    max_new_tokens: int


Answers = list[tuple[Task, Output]]


@dataclass(frozen=True)
class Family:
    """A leader with a short answer, and a follower whose prompt shares a prefix with it.

    A follower is the same prompt again; or one that parts from it after two thirds; or a next turn:
    prompt, start of the answer and new text, so that a hit covers generated tokens. Long prompts
    take turns among the three, short ones are repeated.
    """

    leader: Task
    follower: Task


@dataclass(frozen=True)
class Suite:
    """What the scenarios of one model send. No families where no scenario asks for them."""

    prompts: tuple[Task, ...]
    families: tuple[Family, ...] = ()


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


def families_of(
    tasks: Sequence[Task], answer_of: Mapping[TokenIds, TokenIds]
) -> tuple[Family, ...]:
    """Families of those tasks whose reference answer is known: next turns need it.

    A family depends on all tasks, but not on which of them have an answer.
    """
    families, num_long = [], 0
    for place, task in enumerate(tasks):
        is_long = len(task.input_ids) >= _RELATED_MIN_LEN
        num_long += is_long
        if task.input_ids not in answer_of:
            continue
        # The tail of another prompt: text like any, and a branch no other family shares.
        suffix = tasks[place - 1].input_ids[-_SUFFIX_LEN:]
        follow = _FOLLOWERS[num_long % len(_FOLLOWERS)] if is_long else _repeated
        new_tokens = _CONTINUED_NEW_TOKENS if follow is _next_turn else _LEADER_NEW_TOKENS
        leader = replace(task, max_new_tokens=min(new_tokens, task.max_new_tokens))
        families.append(Family(leader, follow(task, answer_of[task.input_ids], suffix)))
    return tuple(families)


def _repeated(task: Task, answer: TokenIds, suffix: TokenIds) -> Task:
    return task


def _parted(task: Task, answer: TokenIds, suffix: TokenIds) -> Task:
    kept = len(task.input_ids) * 2 // 3
    return replace(
        task, name=f"{task.name} parted at {kept}", input_ids=task.input_ids[:kept] + suffix
    )


def _next_turn(task: Task, answer: TokenIds, suffix: TokenIds) -> Task:
    turn = task.input_ids + answer[:_CONTINUE_AFTER] + suffix
    return replace(task, name=f"{task.name} and a next turn", input_ids=turn)


_FOLLOWERS = (_repeated, _parted, _next_turn)
