"""Answers to a batch of prompts while they are generated: a caller can wait for a steady state."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests

from serving.client import BenchError

_CONNECT_TIMEOUT_S = 10.0
_ABORT_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Progress:
    """One answer so far. times: time.monotonic() of every chunk. A chunk is one iteration of the
    server, unless the server sends several iterations at once."""

    tokens: int = 0
    times: list[float] = field(default_factory=list)
    ended: bool = False


class Stream:
    """Context manager of one request with all prompts. Entering sends the request. Leaving aborts
    all unfinished answers of the whole server. A thread of its own reads the answers; call the
    methods from another thread.
    """

    def __init__(
        self, url: str, prompts: Sequence[Sequence[int]], output_len: int, timeout_s: float
    ) -> None:
        """Prepare the request. timeout_s: limit of every wait, and of every silence of the
        server."""
        self._url, self._timeout_s = url, timeout_s
        self._body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": output_len,
                "ignore_eos": True,
            },
            "stream": True,
        }
        self._answers = [Progress() for _ in prompts]
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._reader = threading.Thread(target=self._read, name="stream", daemon=True)

    def __enter__(self) -> Stream:
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if not self._reader.is_alive():
            return
        # If every answer is complete, there is nothing to abort, and the reply is about to end.
        if all(answer.ended for answer in self.progress()):
            self._reader.join(_ABORT_TIMEOUT_S)
            return
        try:
            requests.post(
                f"{self._url}/abort_request", json={"abort_all": True}, timeout=_ABORT_TIMEOUT_S
            ).raise_for_status()
        except requests.RequestException:
            # An error that is already raised says more than the failure of the abort.
            if kind is None:
                raise
            return
        self._reader.join(_ABORT_TIMEOUT_S)

    def progress(self) -> list[Progress]:
        """Return a copy of the progress of each prompt."""
        with self._changed:
            return [Progress(a.tokens, list(a.times), a.ended) for a in self._answers]

    def wait_chunks(self, count: int) -> None:
        """Block until every answer has grown by `count` more chunks.

        Raises BenchError if an answer ends first, if requests fail, or after timeout_s.
        """
        with self._changed:
            goals = [len(answer.times) + count for answer in self._answers]

            def behind() -> list[Progress]:
                pairs = zip(self._answers, goals, strict=True)
                return [answer for answer, goal in pairs if len(answer.times) < goal]

            def decided() -> bool:
                left = behind()
                return not left or any(answer.ended for answer in left)

            self._wait(decided, f"{count} more chunks of every answer")
            ended = next((answer for answer in behind() if answer.ended), None)
            if ended is not None:
                raise BenchError(
                    f"an answer ended after {ended.tokens} tokens, before every answer had grown "
                    f"by {count} chunks: raise --output-len, or send fewer requests at once"
                )

    def wait_end(self) -> None:
        """Block until every answer is complete. Raises BenchError as wait_chunks() does."""
        with self._changed:
            self._wait(
                lambda: all(answer.ended for answer in self._answers), "the end of every answer"
            )

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        def ended() -> bool:
            return self._failure is not None or reached()

        if not self._changed.wait_for(ended, self._timeout_s):
            raise BenchError(f"timed out after {self._timeout_s:.0f} s, waiting for {what}")
        if self._failure is not None:
            raise BenchError(f"the requests failed: {self._failure}")

    def _read(self) -> None:
        try:
            with requests.post(
                f"{self._url}/generate",
                json=self._body,
                stream=True,
                timeout=(_CONNECT_TIMEOUT_S, self._timeout_s),
            ) as reply:
                if not reply.ok:
                    raise BenchError(f"/generate answered {reply.status_code}: {reply.text[:300]}")
                for line in reply.iter_lines():
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[len(b"data: ") :]))
            self._end(None)
        except Exception as error:
            self._end(str(error))

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise BenchError(str(chunk["error"]))
        now = time.monotonic()
        reason = chunk["meta_info"]["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise BenchError(f"the server aborted a request: {reason.get('message')}")
        with self._changed:
            answer = self._answers[chunk.get("index", 0)]
            answer.tokens = chunk["meta_info"]["completion_tokens"]
            answer.times.append(now)
            answer.ended = reason is not None
            self._changed.notify_all()

    def _end(self, failure: str | None) -> None:
        with self._changed:
            if failure is None and not all(answer.ended for answer in self._answers):
                failure = "the server closed the connection before all answers ended"
            self._failure = failure
            self._changed.notify_all()
