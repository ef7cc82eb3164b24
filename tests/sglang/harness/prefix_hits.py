"""Prompts with known answers, and the tiers in which a server found their prefixes."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from harness.client import GenerateClient
from harness.comparison import compare
from harness.suite import Answers, Task, TokenIds, run_one_by_one

PAGE_SIZE = 64

Pairs = list[tuple[Task, TokenIds]]


def longest_apart(pairs: Pairs, count: int) -> Pairs:
    """Return the longest prompts that have no page in common."""
    by_first_page: dict[TokenIds, tuple[Task, TokenIds]] = {}
    for pair in sorted(pairs, key=lambda pair: -len(pair[0].input_ids)):
        by_first_page.setdefault(pair[0].input_ids[:PAGE_SIZE], pair)
    return list(by_first_page.values())[:count]


def tasks_of(pairs: Pairs) -> list[Task]:
    return [task for task, _ in pairs]


def full_tokens(task: Task) -> int:
    """Return the number of a prompt's tokens that can be cached. Its last token is always
    computed."""
    return (len(task.input_ids) - 1) // PAGE_SIZE * PAGE_SIZE


def check(answers: Answers, expected: Pairs) -> Counter[str]:
    """Check the answers, and return the hit tokens by tier."""
    mismatches = compare(answers, [tokens for _, tokens in expected])
    assert not mismatches, "\n".join(map(str, mismatches))
    for _, output in answers:
        assert sum(output.hit_tokens.values()) == output.cached_len
    return sum((Counter(output.hit_tokens) for _, output in answers), Counter())


def ask(client: GenerateClient, pairs: Pairs) -> tuple[Counter[str], list[dict[str, int]]]:
    """Send one request at a time. Return the hit tokens of all requests and of each, by tier."""
    answers = run_one_by_one(client, tasks_of(pairs), lambda: None)
    return check(answers, pairs), [output.hit_tokens for _, output in answers]


def ask_all_at_once(client: GenerateClient, pairs: Pairs) -> Counter[str]:
    """Send all requests at once. Return the hit tokens by tier."""
    with ThreadPoolExecutor(len(pairs)) as pool:
        answers = pool.map(
            lambda task: client.generate(task.input_ids, task.max_new_tokens), tasks_of(pairs)
        )
        return check(list(zip(tasks_of(pairs), answers, strict=True)), pairs)
