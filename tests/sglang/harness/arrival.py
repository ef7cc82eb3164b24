"""Concurrent requests whose arrival follows from the progress of earlier requests, not from a
clock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from harness.client import GenerateClient, Output
from harness.suite import Answers, OnDone, Task

CONCURRENT = 8
# A request arrives when the one before it has streamed this many tokens: while that one prefills,
# between its first verifications, or well into its answer. The numbers are small enough that many
# requests overlap, although a verification streams a whole draft at once.
_ARRIVE_AFTER_TOKENS = (1, 2, 1, 4, 1, 1, 2, 1)
# One request that drafts, one that verifies and one that prefills.
_MIN_OVERLAP = 3


def run_staggered(client: GenerateClient, tasks: Sequence[Task], on_done: OnDone) -> Answers:
    """Run up to CONCURRENT requests at a time. Return the answers in the order of `tasks`.

    Raises AssertionError where too few requests overlapped, and whatever a request raised.
    """
    gates = [threading.Event() for _ in tasks]
    overlap = _Overlap()

    def send(place: int) -> tuple[Task, Output]:
        task, gap = tasks[place], _ARRIVE_AFTER_TOKENS[place % len(_ARRIVE_AFTER_TOKENS)]

        def on_tokens(num_tokens: int) -> None:
            if num_tokens >= gap:
                gates[place].set()

        if place:
            gates[place - 1].wait()
        try:
            with overlap:
                output = client.stream(task.input_ids, task.max_new_tokens, on_tokens)
        finally:
            # A request that failed must not leave the later ones waiting.
            gates[place].set()
        on_done()
        return task, output

    with ThreadPoolExecutor(CONCURRENT) as pool:
        answers = list(pool.map(send, range(len(tasks))))
    assert overlap.peak >= min(_MIN_OVERLAP, len(tasks)), f"only {overlap.peak} overlapped"
    return answers


class _Overlap:
    """Count of the threads inside, and its peak."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self.peak = 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            self.peak = max(self.peak, self._inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
