"""Requests of an identity run: prompts, and pairs of requests that share a prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.client import GenerateClient, Output
from harness.prompts import Prompt

# Enough for a few full pages before and after the point where two prompts differ.
_RELATED_MIN_LEN = 384
_SUFFIX_LEN = 48
_CONTINUE_AFTER = 80
# Tokens of a leader's answer. 32 are a few drafts' worth, so that the follower of a staggered run
# arrives meanwhile. Before a next turn the answer is a little longer than the part that the turn
# continues.
_LEADER_NEW_TOKENS = 32
_CONTINUED_NEW_TOKENS = _CONTINUE_AFTER + 16

OnDone = Callable[[], None]
TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """One request. `name`: for people to read."""

    name: str
    input_ids: TokenIds
    max_new_tokens: int


Answers = list[tuple[Task, Output]]


@dataclass(frozen=True)
class Family:
    """A leader with a short answer, and a follower whose prompt shares a prefix with it.

    A follower is one of three: the same prompt; a prompt that differs after two thirds; or a next
    turn of prompt, start of the answer and new text, so that a hit covers generated tokens. Long
    prompts take turns among the three, and short ones are repeated.
    """

    leader: Task
    follower: Task


@dataclass(frozen=True)
class Suite:
    """Requests of all scenarios of one model. Without scenarios that need families there are
    none."""

    prompts: tuple[Task, ...]
    families: tuple[Family, ...] = ()


def run_one_by_one(client: GenerateClient, tasks: Sequence[Task], on_done: OnDone) -> Answers:
    """Run every task alone on the server, in order."""
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
    """Return the families of the tasks whose reference answer is known, which next turns need.

    A family depends on all tasks, but not on which of them have an answer.
    """
    families, num_long = [], 0
    for place, task in enumerate(tasks):
        is_long = len(task.input_ids) >= _RELATED_MIN_LEN
        num_long += is_long
        if task.input_ids not in answer_of:
            continue
        # The tail of another prompt: ordinary text, and a branch that no other family shares.
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
