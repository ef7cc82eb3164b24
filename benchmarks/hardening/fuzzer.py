"""Fuzzing of a live server with generated requests, with valid requests beside them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hardening.generation import Attempt, attempts

CONNECT_S, READ_S = 10.0, 120.0
# Seconds that pages of aborted requests may stay in use, and seconds between two checks.
SETTLE_S, POLL_S = 60.0, 0.1
# Requests of a batch, and how many of them run at once.
BATCH = 20
AT_ONCE = 8
# Valid prompts with known answers, sent beside each batch, and the tokens of each answer.
NEIGHBOURS = (
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n" * 6,
    "def add(first, second):\n    return",
)
NEIGHBOUR_TOKENS = 24
# A traceback in a log is a finding: SGLang logs a refused request in one line.
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")


@dataclass(slots=True)
class FuzzResult:
    """Counts so far. The lists hold one sentence per finding. statuses: number of answers by HTTP
    status; 0 stands for answers that the client cut short."""

    requests: int = 0
    batches: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    crashes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    neighbours_changed: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not any(
            (self.crashes, self.errors, self.neighbours_changed, self.leaks, self.tracebacks)
        )

    def findings(self) -> list[str]:
        """Return every finding, with its kind."""
        kinds = ("crashes", "errors", "neighbours_changed", "leaks", "tracebacks")
        return [f"{kind}: {text}" for kind in kinds for text in getattr(self, kind)]


class Fuzzer:
    """Attack on one server, batch by batch.

    url: address of the server under attack. ask: returns the answer to a neighbour's prompt; a
    server of a pair is asked through its door. held: describes what is in use while no request
    runs, "" for nothing. logs: logs of every process that may be damaged.
    """

    def __init__(
        self,
        url: str,
        *,
        ask: Callable[[str], str],
        held: Callable[[], str],
        logs: Sequence[Path],
    ) -> None:
        self._url, self._ask, self._held = url, ask, held
        self._logs = {path: path.stat().st_size for path in logs}
        self._lock = threading.Lock()
        self.result = FuzzResult()
        self._expected = {prompt: ask(prompt) for prompt in NEIGHBOURS}

    def attack(self, batch: Sequence[Attempt]) -> None:
        """Send a batch with neighbours beside it. Look for damage once all requests have ended."""
        result = self.result
        with ThreadPoolExecutor(AT_ONCE + len(NEIGHBOURS)) as pool:
            neighbours = [pool.submit(self._check_neighbour, prompt) for prompt in NEIGHBOURS]
            list(pool.map(self._send, batch))
            for each in neighbours:
                each.result()
        result.requests += len(batch)
        result.batches += 1
        self._look_for_leaks(batch)
        self._read_logs(batch)

    def _send(self, attempt: Attempt) -> None:
        is_told = False
        try:
            with requests.post(
                self._url + attempt.path,
                data=attempt.body,
                headers=dict(attempt.headers),
                stream=True,
                timeout=(CONNECT_S, READ_S),
            ) as reply:
                status = reply.status_code
                try:
                    for number, part in enumerate(reply.iter_content(None)):
                        is_told = b'"error"' in part
                        if number == attempt.hang_up_after:
                            status = 0
                            break
                except requests.exceptions.ChunkedEncodingError:
                    # The door ends a failed stream in this way, after an event with the reason.
                    if not is_told:
                        raise
        except requests.RequestException as error:
            self._note("crashes", f"{type(error).__name__} after {attempt}")
            return
        with self._lock:
            self.result.statuses[status] = self.result.statuses.get(status, 0) + 1
        if status >= 500:
            self._note("errors", f"{status} for {attempt}")

    def _check_neighbour(self, prompt: str) -> None:
        try:
            text = self._ask(prompt)
        except requests.RequestException as error:
            self._note("crashes", f"a valid request failed with {type(error).__name__}: {error}")
            return
        if text != self._expected[prompt]:
            self._note("neighbours_changed", f"the answer to {prompt[:20]!r} became {text[:200]!r}")

    def _look_for_leaks(self, batch: Sequence[Attempt]) -> None:
        deadline = time.monotonic() + SETTLE_S
        try:
            # An abort takes effect some iterations after the client has disconnected.
            while (held := self._held()) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        except requests.RequestException as error:
            held = ""
            self._note("crashes", f"{type(error).__name__} after {_shown(batch)}")
        if held:
            self._note("leaks", f"{held} after {_shown(batch)}")

    def _read_logs(self, batch: Sequence[Attempt]) -> None:
        for path, seen in self._logs.items():
            with path.open("rb") as log:
                log.seek(seen)
                text = log.read().decode(errors="replace")
                self._logs[path] = log.tell()
            if match := _TRACEBACK.search(text):
                end = text[match.start() :][-1500:]
                self._note("tracebacks", f"{path.name}: {end} after {_shown(batch)}")

    def _note(self, kind: str, text: str) -> None:
        with self._lock:
            getattr(self.result, kind).append(text)


def run(fuzzer: Fuzzer, vocab_size: int, num_requests: int, seed: int) -> FuzzResult:
    """Attack with `num_requests` generated requests, in batches of BATCH. End early at a crash or a
    leak: further findings would only repeat it."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=-(-num_requests // BATCH),
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(attempts(vocab_size), min_size=BATCH, max_size=BATCH))
    def attack(batch: list[Attempt]) -> None:
        # Hypothesis repeats a batch after an error, when the server may be dead already.
        if not fuzzer.result.crashes and not fuzzer.result.leaks:
            fuzzer.attack(batch)

    attack()
    return fuzzer.result


def _shown(batch: Sequence[Attempt]) -> str:
    return "\n".join(map(str, batch))


def ask_generate(url: str, prompt: str, **fields: Any) -> str:
    """Return the greedy answer of /generate to a neighbour's prompt, read from a stream. A chunk
    that does not begin with the text before it changes the returned text."""
    params = {"temperature": 0, "max_new_tokens": NEIGHBOUR_TOKENS, "ignore_eos": True}
    text = ""
    with requests.post(
        f"{url}/generate",
        json={"text": prompt, "sampling_params": params, "stream": True, **fields},
        timeout=(CONNECT_S, READ_S),
        stream=True,
    ) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                chunk = json.loads(line.removeprefix(b"data: "))
                said = str(chunk.get("text", f"error: {chunk}"))
                text = said if said.startswith(text) else f"{text} became {said}"
    return text


def held_by(url: str) -> str:
    """Describe what a server holds while no request runs: pages that are no cached prefix, pages in
    flight, window pages. Return "" if it holds nothing."""
    info = requests.get(f"{url}/server_info", timeout=(CONNECT_S, READ_S)).json()
    report = info["internal_states"][0]["kvspec"]
    states, pools = report["page_states"], report["pools"]
    encoded = sum(states.values()) - states["ABSENT"]
    allocated, in_window = pools["num_pages_allocated"], pools["window_pages_used"]
    if encoded == allocated and not in_window and not states["IN_FLIGHT"]:
        return ""
    return (
        f"{allocated} pages allocated, {encoded} encoded ({states}), {in_window} in the recent "
        "window"
    )
