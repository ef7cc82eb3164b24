"""Timing of one streamed request to a prefill and a decode server."""

from __future__ import annotations

import json
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import requests

from kvspec_testkit.servers.server_pair import ServerPair

TIMEOUT_S = (10, 900)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. seen: (seconds since the epoch, tokens so far) of every chunk that arrived."""

    output_ids: tuple[int, ...]
    meta: dict[str, Any]
    seen: tuple[tuple[float, int], ...]

    @property
    def transfer(self) -> dict[str, Any]:
        return dict(self.meta["kvspec"]["transfer"])

    def computed_s(self, k: int) -> float:
        """Return the seconds from the end of the prefill until the k-th token was computed, as a
        kept draft or otherwise (TTKT, Lynx section 6)."""
        return float(self.meta["kvspec_token_s"][k - 1])

    def seen_s(self, k: int) -> float:
        """Return the seconds from the end of the prefill until the client had the k-th token,
        verified."""
        at = next(at for at, num_tokens in self.seen if num_tokens >= k)
        return at - float(self.transfer["prefill_ended_at"])


def ask(pair: ServerPair, input_ids: list[int], max_new_tokens: int) -> Answer:
    """Send one request to both servers, and time its answer. Raises requests.HTTPError if either
    server answers an error."""
    body = {
        "input_ids": input_ids,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
        },
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": pair.bootstrap_port,
        "bootstrap_room": secrets.randbits(62),
    }
    errors: list[BaseException] = []

    def prefill() -> None:
        try:
            url = f"{pair.prefill.base_url}/generate"
            requests.post(url, json=body, timeout=TIMEOUT_S).raise_for_status()
        except requests.RequestException as error:
            errors.append(error)

    thread = threading.Thread(target=prefill)
    thread.start()
    seen: list[tuple[float, int]] = []
    last: dict[str, Any] = {}
    with requests.post(
        f"{pair.decode.base_url}/generate",
        json={**body, "stream": True},
        stream=True,
        timeout=TIMEOUT_S,
    ) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines(chunk_size=1):
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            last = json.loads(line.removeprefix(b"data: "))
            if "error" in last:
                raise requests.HTTPError(str(last["error"]))
            seen.append((time.time(), len(last["output_ids"])))
    thread.join()
    if errors:
        raise errors[0]
    return Answer(tuple(last["output_ids"]), last["meta_info"], tuple(seen))
