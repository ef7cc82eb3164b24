"""Priorities among waiting requests, copies that stall and pages that change in the store: answers
are plain SGLang's or an error, and no page stays allocated.

Shares its server with test_soak.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from harness.client import GenerateClient
from harness.crowding import crowded_server
from harness.servers import ServerSwitch
from harness.soak import CROWD_SIZE, Soak
from harness.suite import Task, TokenIds

pytestmark = pytest.mark.server

Answers = list[tuple[Task, TokenIds]]

IS_CORRUPT = "of the residual store is corrupt"


@pytest.fixture
def client(
    soak_schedule: str,
    servers: ServerSwitch,
    soak_fault_file: Path,
    prefix_folder: Path,
) -> GenerateClient:
    client = servers.use(crowded_server(soak_schedule, soak_fault_file, prefix_folder))
    client.flush_cache()
    return client


@pytest.fixture
def soak(client: GenerateClient, crowd_answers: Answers) -> Soak:
    return Soak(client, crowd_answers, concurrent=CROWD_SIZE, seed=1)


@pytest.fixture
def fault(soak_fault_file: Path) -> Iterator[Callable[[str], None]]:
    yield lambda name: soak_fault_file.write_text(name) and None
    soak_fault_file.write_text("none")


def report(client: GenerateClient) -> dict[str, Any]:
    return client.server_info()["internal_states"][0]["kvspec"]


def check(soak: Soak) -> None:
    assert not soak.result.mismatches, "\n".join(soak.result.mismatches)
    assert not soak.result.leaks, "\n".join(soak.result.leaks)


def test_a_high_priority_overtakes_those_that_wait(
    client: GenerateClient, crowd_answers: Answers
) -> None:
    # The longest prompts, so that the last requests wait for long.
    tasks = sorted(crowd_answers, key=lambda pair: -len(pair[0].input_ids))[:48]
    finished: list[int] = []
    lock = threading.Lock()

    def ask(index: int, priority: int) -> TokenIds:
        task, _ = tasks[index]
        output = client.generate(task.input_ids, task.max_new_tokens, priority=priority)
        with lock:
            finished.append(index)
        return output.output_ids

    with ThreadPoolExecutor(len(tasks)) as pool:
        low = [pool.submit(ask, index, 0) for index in range(1, len(tasks))]
        while report(client)["pressure"]["waiting_for_pages"] < 8:
            assert not all(future.done() for future in low), "no request had to wait"
        high = pool.submit(ask, 0, 10)
        outputs = [future.result() for future in (high, *low)]
    assert outputs == [answer for _, answer in tasks]
    assert finished.index(0) < len(tasks) - 5, f"it came {finished.index(0) + 1}th"


def test_stalled_copies_delay_no_request_for_good(
    soak: Soak, client: GenerateClient, fault: Callable[[str], None], crowd_answers: Answers
) -> None:
    def waits_of(tasks: list[Task]) -> int:
        before = report(client)["counters"]["verification_wait_iterations"]
        soak.send(tasks)
        return report(client)["counters"]["verification_wait_iterations"] - before

    tasks = [task for task, _ in crowd_answers[::4]]
    calm = waits_of(tasks)
    client.flush_cache()
    fault("stalled_copy")
    # No copy ends before all requests have their answers.
    stalled = waits_of(tasks)
    num_fetching = report(client)["page_states"]["FETCHING"]
    fault("none")
    check(soak)
    # The fault had an effect: fetches had not ended, or requests waited for them.
    assert num_fetching or stalled > calm


def test_a_page_that_changed_in_the_store_fails_its_requests_alone(
    soak: Soak, client: GenerateClient, fault: Callable[[str], None], crowd_answers: Answers
) -> None:
    fault("flipped_bit")
    some = crowd_answers[:32:2]
    results = answers_or_errors(client, some)
    fault("none")
    failed = [result for result in results if isinstance(result, str)]
    assert 0 < len(failed) < len(results)
    assert all("500" in error and IS_CORRUPT in error for error in failed), failed
    for (task, right), result in zip(some, results, strict=True):
        assert isinstance(result, str) or result == right, task.name
    counters = report(client)["counters"]
    assert counters["requests_with_corrupt_residuals"] >= len(failed)
    soak.look_for_leaks()
    # Pages that were cached under the fault stay corrupt, and are noticed, until a flush.
    client.flush_cache()
    soak.send([task for task, _ in some])
    check(soak)


def answers_or_errors(
    client: GenerateClient, answers: Sequence[tuple[Task, TokenIds]]
) -> list[TokenIds | str]:
    """Send all tasks at once, every other one streamed, and return answers or errors. A stream that
    fails must have sent right tokens."""

    def ask(index: int) -> TokenIds | str:
        task, right = answers[index]
        try:
            if index % 2:
                return client.generate(task.input_ids, task.max_new_tokens).output_ids
            output = client.stream(task.input_ids, task.max_new_tokens, lambda num_tokens: None)
        except requests.HTTPError as error:
            return str(error)
        assert output.output_ids == right[: len(output.output_ids)]
        reason = output.meta["finish_reason"]
        return str(reason) if reason["type"] == "abort" else output.output_ids

    with ThreadPoolExecutor(len(answers)) as pool:
        return list(pool.map(ask, range(len(answers))))
