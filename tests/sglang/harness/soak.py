"""Random traffic: rounds of many concurrent requests, of which some are cut short."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from harness.client import GenerateClient, Output
from harness.suite import Task, TokenIds

# Lengths of prompts. Each prompt has a follower that shares a prefix; short prompts are repeated.
CROWD_LENGTHS = tuple(100 + 13 * i for i in range(32))
CROWD_SIZE = 2 * len(CROWD_LENGTHS)
# Seconds in which aborted requests must have ended, and seconds between polls.
SETTLE_S, POLL_S = 60.0, 0.2
# Endings of requests, in percent: read whole, streamed whole, aborted by id, hung up.
_ENDINGS = {"whole": 30, "streamed": 40, "aborted": 15, "hung up": 15}


@dataclass(slots=True)
class SoakResult:
    """Counts of all rounds so far. mismatches and leaks: sentences. peak_encoded: most encoded
    pages at once, of which the residual cache holds at most cache_pages. bytes_fetched: bytes of
    residuals fetched into the cache, hits_from_disk: tokens of prompts, both since the server
    started."""

    requests: int = 0
    cut_short: int = 0
    retractions: int = 0
    rounds: int = 0
    peak_encoded: int = 0
    cache_pages: int = 0
    bytes_fetched: int = 0
    hits_from_disk: int = 0
    mismatches: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests in {self.rounds} rounds, {self.cut_short} cut short, "
            f"{self.retractions} retractions, {len(self.mismatches)} differ, "
            f"{len(self.leaks)} leaks, at most {self.peak_encoded} encoded pages over a cache of "
            f"{self.cache_pages}, {self.bytes_fetched / 2**20:.0f} MiB fetched, "
            f"{self.hits_from_disk} tokens from disk"
        )


class Soak:
    """Rounds of tasks with known answers, and a search for leaks after each.

    A seed decides the tasks, their order and how each ends. Threads decide how the requests
    overlap.
    """

    def __init__(
        self,
        client: GenerateClient,
        answers: Sequence[tuple[Task, TokenIds]],
        *,
        concurrent: int,
        seed: int,
    ) -> None:
        self.client = client
        self._tasks = [task for task, _ in answers]
        self._answer_of = dict(answers)
        self._concurrent = concurrent
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.result = SoakResult()

    def send(self, tasks: Sequence[Task]) -> None:
        """Send these tasks at the same time, each to its end."""
        self._round([(task, "streamed") for task in tasks])

    def crowd(self) -> None:
        """Send every task once, all at the same time, each to its end."""
        self.send(self._tasks)

    def random_round(self, num_requests: int) -> None:
        tasks = self._random.choices(self._tasks, k=num_requests)
        endings = self._random.choices(list(_ENDINGS), weights=_ENDINGS.values(), k=num_requests)
        self._round(list(zip(tasks, endings, strict=True)))

    def _round(self, requests: Sequence[tuple[Task, str]]) -> None:
        seeds = [self._random.random() for _ in requests]
        with (
            _Watch(self._look),
            ThreadPoolExecutor(min(self._concurrent, len(requests))) as pool,
        ):
            list(pool.map(self._send, *zip(*requests, strict=True), seeds))
        self.result.rounds += 1
        self.look_for_leaks()

    def _send(self, task: Task, ending: str, seed: float) -> None:
        client, ids, new_tokens = self.client, task.input_ids, task.max_new_tokens
        if ending == "whole":
            output = client.generate(ids, new_tokens)
        elif ending == "streamed":
            output = client.stream(ids, new_tokens, lambda num_tokens: None)
        else:
            after = int(seed * new_tokens)
            output = client.cut_short(ids, new_tokens, after, by_id=ending == "aborted")
        self._judge(task, output, cut=ending in ("aborted", "hung up"))

    def _judge(self, task: Task, output: Output, *, cut: bool) -> None:
        right, got = self._answer_of[task], output.output_ids
        is_short = len(got) < len(right)
        with self._lock:
            self.result.requests += 1
            self.result.cut_short += cut and is_short
            self.result.retractions += output.num_retractions
            if got != right[: len(got)]:
                place = next(i for i in range(len(got)) if got[: i + 1] != right[: i + 1])
                self.result.mismatches.append(f"{task.name}: token {place} of {len(got)} differs")
            elif is_short and not cut:
                self.result.mismatches.append(f"{task.name}: {len(got)} of {len(right)} tokens")

    def _look(self) -> None:
        report = self.report()
        self.result.cache_pages = report["pools"]["residual_cache_pages"]
        self.result.bytes_fetched = report["bytes_fetched"]
        self.result.hits_from_disk = report["counters"]["hit_tokens"]["disk"]
        self.result.peak_encoded = max(self.result.peak_encoded, _encoded_pages(report))

    def look_for_leaks(self) -> None:
        """Check that only cached prefixes remain once no request runs: as many encoded pages as
        SGLang has allocated, and an empty window. Flush them in every second round."""
        deadline = time.monotonic() + SETTLE_S
        while (held := self._held()) and time.monotonic() < deadline:
            # An abort takes effect some iterations after its answer, and the server does not report
            # it.
            time.sleep(POLL_S)
        if held:
            self.result.leaks.append(f"after round {self.result.rounds}: {held}")
        if self.result.rounds % 2 == 1:
            self.client.flush_cache()

    def _held(self) -> str:
        """Return a sentence about the memory that is in use although no request runs, or an empty
        string."""
        report = self.report()
        states, pools = report["page_states"], report["pools"]
        allocated = pools["num_pages_allocated"]
        encoded = _encoded_pages(report)
        if encoded == allocated and not pools["window_pages_used"] and not states["IN_FLIGHT"]:
            return ""
        return (
            f"{allocated} pages are allocated, {encoded} of them encoded ({states}), "
            f"{pools['window_pages_used']} in the window"
        )

    def report(self) -> dict:
        return self.client.server_info()["internal_states"][0]["kvspec"]


def _encoded_pages(report: dict) -> int:
    states = report["page_states"]
    return sum(states.values()) - states["ABSENT"]


class _Watch:
    """Call `look` every POLL_S seconds in a thread, and raise its exception on exit."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: Exception | None = None

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._over.wait(POLL_S):
                self._look()
        except Exception as error:
            self._error = error
