"""A prefill and a decode server side by side, used as if they were one server."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from harness.client import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, GenerateClient
from harness.servers import START_TIMEOUT_S, Announce

from kvspec_testkit.servers.server_pair import ServerPair
from kvspec_testkit.servers.server_process import CPU_ARGUMENTS

# Seconds between two polls in wait_until().
POLL_S = 0.1


@dataclass(frozen=True)
class PairSpec:
    """Arguments of both servers, followed by those of one side."""

    model: Path
    arguments: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return " ".join([self.model.name, *self.arguments, *self.prefill])


class PairClient(GenerateClient):
    """Client that posts every request to both servers, in one room, and returns the answers and
    reports of the decode server. Threads may share it."""

    def __init__(self, pair: ServerPair, bootstrap_host: str = "127.0.0.1") -> None:
        super().__init__(pair.decode.base_url)
        self.prefill = GenerateClient(pair.prefill.base_url)
        self._bootstrap_host, self._bootstrap_port = bootstrap_host, pair.bootstrap_port
        self._rooms = random.SystemRandom()
        # Errors of the prefill server, for requests that failed there.
        self.prefill_errors: list[str] = []

    def flush_cache(self) -> None:
        super().flush_cache()
        self.prefill.flush_cache()

    def room(self) -> dict[str, Any]:
        """Return the fields of a request that name a new room."""
        return {
            "bootstrap_host": self._bootstrap_host,
            "bootstrap_port": self._bootstrap_port,
            "bootstrap_room": self._rooms.getrandbits(62),
        }

    def prefill_only(self, body: dict[str, Any]) -> threading.Thread:
        """Post to the prefill server in the background. A door would post to both servers at
        once."""

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

    def decode_only(self, body: dict[str, Any]) -> None:
        """Post to the decode server in the background, and ignore its answer."""

        def post() -> None:
            with suppress(requests.RequestException):
                requests.post(
                    f"{self.base_url}/generate",
                    json=body,
                    timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
                )

        threading.Thread(target=post, daemon=True).start()

    def _send(self, body: dict[str, Any], *, stream: bool) -> requests.Response:
        body = {**body, **self.room()}
        self.prefill_only(body)
        return super()._send(body, stream=stream)


class Pair(ServerPair):
    """Two servers, with clients for them."""

    @property
    def client(self) -> PairClient:
        return PairClient(self)

    def client_by(self, bootstrap_host: str) -> PairClient:
        """Return a client whose requests name the prefill server's machine by this host name. A
        decode server has one link to each name."""
        return PairClient(self, bootstrap_host)

    @property
    def bootstrap_url(self) -> str:
        return f"http://127.0.0.1:{self.bootstrap_port}"

    def restart_prefill(self) -> None:
        self.replace_prefill().start()
        self.prefill.wait_healthy(START_TIMEOUT_S)

    def restart_decode(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.replace_decode(*arguments, environment=environment).start()
        self.decode.wait_healthy(START_TIMEOUT_S)


@contextmanager
def running_pair(spec: PairSpec, log_folder: Path, announce: Announce) -> Iterator[Pair]:
    started = time.monotonic()
    pair = Pair(
        (*CPU_ARGUMENTS, f"--model-path={spec.model}", "--kvspec", *spec.arguments),
        log_folder=log_folder,
        prefill=spec.prefill,
        decode=spec.decode,
        environment=spec.environment,
    )
    with pair:
        pair.wait_healthy(START_TIMEOUT_S)
        announce(f"two servers up in {time.monotonic() - started:.0f} s: {spec.label}")
        yield pair


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait for a state that a server reaches some iterations after its answer, without reporting
    it."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(POLL_S)


def wait_until_stored(client: GenerateClient, tier: str) -> None:
    """Wait until a server has written all that waits for a prefix tier, `disk` or `remote`."""
    wait_until(
        lambda: not client.kvspec_report()["prefix_tiers"][tier]["waiting_bytes"],
        f"prefixes were not written to the tier {tier}",
    )
