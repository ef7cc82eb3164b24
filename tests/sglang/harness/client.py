"""Client of one running server, with prompts and answers in token ids."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import requests

CONNECT_TIMEOUT_S = 10
# One request may wait behind seven others and their retractions.
READ_TIMEOUT_S = 600
# The scheduler drops a finished request a moment after its last token was streamed.
FLUSH_TIMEOUT_S = 30


@dataclass(frozen=True)
class Output:
    """Answer of the server to one request."""

    output_ids: tuple[int, ...]
    meta: dict[str, Any]

    @property
    def cached_len(self) -> int:
        return int(self.meta.get("cached_tokens") or 0)

    @property
    def hit_tokens(self) -> dict[str, int]:
        """Return the cached tokens of the prompt by tier."""
        return dict(self.meta["kvspec"]["hit_tokens"])

    @property
    def num_retractions(self) -> int:
        return int(self.meta.get("num_retractions") or 0)


class GenerateClient:
    """Client for greedy /generate requests that always run to `max_new_tokens`. Threads may share
    it."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, priority: int | None = None
    ) -> Output:
        """Return one answer, received as a whole. Raises requests.HTTPError on an error status."""
        reply = self._post(input_ids, max_new_tokens, stream=False, priority=priority)
        return _output(reply.json())

    def stream(
        self, input_ids: Sequence[int], max_new_tokens: int, on_tokens: Callable[[int], None]
    ) -> Output:
        """Return one streamed answer. `on_tokens(n)` is called with the number of tokens so far."""
        last: dict[str, Any] | None = None
        with self._post(input_ids, max_new_tokens, stream=True) as reply:
            for last in self._chunks(reply):
                on_tokens(len(last["output_ids"]))
        if last is None:
            raise requests.HTTPError(f"{self.base_url} closed a stream without one chunk")
        return _output(last)

    def cut_short(
        self, input_ids: Sequence[int], max_new_tokens: int, after: int, *, by_id: bool
    ) -> Output:
        """Stop an answer once `after` tokens have arrived, and return the part that has arrived.
        by_id: abort the request by its id, after which the stream ends by itself; otherwise hang
        up."""
        rid, answer = uuid.uuid4().hex, Output((), {})
        with self._post(input_ids, max_new_tokens, stream=True, rid=rid) as reply:
            if after == 0 and by_id:
                self._abort(rid)
            is_over = False
            for chunk in self._chunks(reply):
                answer = _up_to(chunk, answer)
                if len(answer.output_ids) < after or is_over:
                    continue
                if not by_id:
                    break
                self._abort(rid)
                is_over = True
        return answer

    def _abort(self, rid: str) -> None:
        reply = requests.post(
            f"{self.base_url}/abort_request",
            json={"rid": rid},
            timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        )
        reply.raise_for_status()

    def _chunks(self, reply: requests.Response) -> Iterator[dict[str, Any]]:
        for line in reply.iter_lines():
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise requests.HTTPError(f"{self.base_url}: {chunk['error']}")
            yield chunk

    def server_info(self) -> dict[str, Any]:
        reply = requests.get(
            f"{self.base_url}/server_info", timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
        )
        reply.raise_for_status()
        return dict(reply.json())

    def kvspec_report(self) -> dict[str, Any]:
        return dict(self.server_info()["internal_states"][0]["kvspec"])

    def flush_cache(self) -> None:
        """Drop all cached prefixes, once running requests have ended."""
        reply = requests.post(
            f"{self.base_url}/flush_cache",
            params={"timeout": FLUSH_TIMEOUT_S},
            timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        )
        reply.raise_for_status()

    def _post(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        stream: bool,
        rid: str | None = None,
        priority: int | None = None,
    ) -> requests.Response:
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        ids = {"input_ids": list(input_ids), "rid": rid, "priority": priority}
        return self._send({**ids, "sampling_params": params}, stream=stream)

    def _send(self, body: dict[str, Any], *, stream: bool) -> requests.Response:
        reply = requests.post(
            f"{self.base_url}/generate",
            json={**body, "stream": stream},
            stream=stream,
            timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        )
        if not reply.ok:
            raise requests.HTTPError(
                f"{self.base_url} answered {reply.status_code}: {reply.text[:500]}"
            )
        return reply


def _output(answer: dict[str, Any]) -> Output:
    return Output(tuple(answer["output_ids"]), answer["meta_info"])


def _up_to(chunk: dict[str, Any], earlier: Output) -> Output:
    """Return the answer up to this chunk of an aborted stream. SGLang ends the stream of a request
    that it aborts in its queue, where retracted requests wait, with the last token alone."""
    output = _output(chunk)
    is_end = (output.meta.get("finish_reason") or {}).get("type") == "abort"
    if not is_end or len(output.output_ids) >= len(earlier.output_ids):
        return output
    assert output.output_ids == earlier.output_ids[-1:], "the last chunk has another token"
    return Output(earlier.output_ids, output.meta)
