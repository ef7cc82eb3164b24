"""A prefill and a decode server side by side, asked as if they were one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from harness.client import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, GenerateClient
from harness.servers import START_TIMEOUT_S, Announce

from sglang_kvspec.testing.server_pair import ServerPair
from sglang_kvspec.testing.server_process import CPU_ARGUMENTS

# Between one look and the next at what ends by itself.
POLL_S = 0.1


@dataclass(frozen=True)
class PairSpec:
    """arguments are both servers'; those of one side come after them."""

    model: Path
    arguments: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


class PairClient(GenerateClient):
    """Posts every request to both servers, in one room, and answers what the decode server does;
    reports are the decode server's. Safe to share by threads."""

    def __init__(self, pair: ServerPair) -> None:
        super().__init__(pair.decode.base_url)
        self.prefill = GenerateClient(pair.prefill.base_url)
        self._bootstrap_port = pair.bootstrap_port
        self._rooms = random.SystemRandom()
        # What the prefill server said to requests that failed there.
        self.prefill_errors: list[str] = []

    def flush_cache(self) -> None:
        super().flush_cache()
        self.prefill.flush_cache()

    def room(self) -> dict[str, Any]:
        """Fields of a request that name a room of its own."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._bootstrap_port,
            "bootstrap_room": self._rooms.getrandbits(62),
        }

    def prefill_only(self, body: dict[str, Any]) -> threading.Thread:
        """Post to the prefill server, in the background; a door would do both at once."""

        def post() -> None:
            try:
                reply = requests.post(
                    f"{self.prefill.base_url}/generate",
                    json={**body, "stream": False},
                    timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
                )
                if not reply.ok:
                    self.prefill_errors.append(f"{reply.status_code}: {reply.text[:500]}")
            except requests.RequestException as error:
                self.prefill_errors.append(str(error))

        thread = threading.Thread(target=post, daemon=True)
        thread.start()
        return thread

    def _post(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        stream: bool,
        rid: str | None = None,
        priority: int | None = None,
    ) -> requests.Response:
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
            "rid": rid,
            "priority": priority,
            **self.room(),
        }
        self.prefill_only(body)
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


@contextmanager
def running_pair(spec: PairSpec, log_folder: Path, announce: Announce) -> Iterator[ServerPair]:
    started = time.monotonic()
    pair = ServerPair(
        (*CPU_ARGUMENTS, f"--model-path={spec.model}", "--kvspec", *spec.arguments),
        log_folder=log_folder,
        prefill=spec.prefill,
        decode=spec.decode,
        environment=spec.environment,
    )
    with pair:
        pair.wait_healthy(START_TIMEOUT_S)
        label = " ".join([spec.model.name, *spec.arguments, *spec.prefill])
        announce(f"two servers up in {time.monotonic() - started:.0f} s: {label}")
        yield pair


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """For what ends on a server some iterations after its answer, and nobody is told of."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(POLL_S)
