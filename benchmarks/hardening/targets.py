"""Servers to attack, in every role, and checks that they are undamaged afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import requests

from hardening.fuzzer import Fuzzer, ask_generate, held_by
from hardening.store_attack import attack_store
from kvspec_testkit.servers.door_process import open_door
from kvspec_testkit.servers.prefix_server_process import PrefixServerProcess
from kvspec_testkit.servers.server_pair import ServerPair
from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "demo-5m"
VOCAB_SIZE = 4096
CHAT_TEMPLATE = ROOT / "tests" / "sglang" / "harness" / "chat.jinja"
START_TIMEOUT_S = 480.0
SHARED = (
    *CPU_ARGUMENTS,
    f"--model-path={MODEL}",
    f"--chat-template={CHAT_TEMPLATE}",
    "--max-total-tokens=24576",
    "--kvspec",
)
# Environment that makes SGLang retract requests now and then.
RETRACT = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "3"))


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of a server of one process. arguments, environment: differences to the default.
    share: share of all requests to single servers. kills_store: the server's prefix server is
    killed and restarted while requests run."""

    name: str
    share: float
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    kills_store: bool = False


VARIANTS = (
    Variant("default", 0.3),
    Variant("rounds", 0.15, ("--kvspec-schedule=rounds",)),
    Variant("int8-log4", 0.15, ("--kvspec-target=int8", "--kvspec-codec=log4")),
    Variant("retraction", 0.15, environment=RETRACT),
    Variant(
        "small-cache-rounds",
        0.1,
        ("--kvspec-residual-hbm-fraction=0.05", "--kvspec-schedule=rounds"),
    ),
    Variant("killed-store", 0.15, kills_store=True),
)


@contextmanager
def single(variant: Variant, folder: Path) -> Iterator[Fuzzer]:
    """Run a server of one process, and a prefix server if the variant kills one. Yield a fuzzer."""
    log_path = folder / f"{variant.name}.log"
    if not variant.kills_store:
        with _server(variant, log_path) as server:
            yield _fuzzer(server.base_url, [server.base_url], [log_path])
        return
    with PrefixServerProcess(folder / f"{variant.name}-prefixes") as store:
        flags = (f"--kvspec-prefix-server={store.address}", "--kvspec-prefix-wait-ms=500")
        with _server(variant, log_path, *flags) as server, _killing(store):
            yield _fuzzer(server.base_url, [server.base_url], [log_path])


@contextmanager
def pair(folder: Path) -> Iterator[dict[str, Fuzzer]]:
    """Run a prefill server, a decode server and their door. Yield fuzzers by role. Neighbours are
    sent through the door."""
    with ServerPair(SHARED, log_folder=folder) as servers:
        servers.wait_healthy(START_TIMEOUT_S)
        log_path = folder / "door.log"
        with open_door(servers, log_path, START_TIMEOUT_S) as door_url:
            both = [servers.prefill.base_url, servers.decode.base_url]
            logs = [servers.prefill.log_path, servers.decode.log_path, log_path]
            urls = dict(zip(("prefill", "decode", "door"), (*both, door_url), strict=True))
            yield {role: _fuzzer(url, both, logs, ask_url=door_url) for role, url in urls.items()}


@contextmanager
def _server(variant: Variant, log_path: Path, *more: str) -> Iterator[ServerProcess]:
    server = ServerProcess(
        (*SHARED, *variant.arguments, *more),
        environment=dict(variant.environment),
        log_path=log_path,
    )
    with server:
        server.wait_healthy(START_TIMEOUT_S)
        yield server


def _fuzzer(url: str, holders: list[str], logs: list[Path], ask_url: str | None = None) -> Fuzzer:
    def held() -> str:
        return "; ".join(filter(None, map(held_by, holders)))

    return Fuzzer(url, ask=partial(ask_generate, ask_url or url), held=held, logs=logs)


@contextmanager
def _killing(store: PrefixServerProcess, every_s: float = 2.0) -> Iterator[None]:
    """Kill the prefix server and start it again, over and over, until the attack is over."""
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.wait(every_s):
            store.kill()
            store.start()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def attack_prefix_server(folder: Path, num_messages: int, seed: int) -> list[str]:
    """Attack a prefix server that a server uses. Return the findings.

    Before the attack, the server answers a prompt and publishes its prefix. After the attack, the
    server drops its local prefixes. It must find the prefix on the prefix server, and give the same
    answer.
    """
    with PrefixServerProcess(folder / "attacked-prefixes") as store:
        flags = (f"--kvspec-prefix-server={store.address}", "--kvspec-prefix-wait-ms=20000")
        with _server(Variant("prefix-user", 0), folder / "prefix-user.log", *flags) as server:
            url = server.base_url
            prompt = "import os\n\n\nclass Reader:\n    def __init__(self):\n        pass\n" * 12
            expected, _ = _ask_cold(url, prompt)
            attack_store(store.address, num_messages, seed)
            findings = [] if store.is_alive else ["crashes: the prefix server has ended"]
            text, num_remote = _ask_cold(url, prompt)
            if text != expected:
                findings.append(f"neighbours_changed: the answer became {text[:200]!r}")
            if not num_remote:
                findings.append("neighbours_changed: the prefix server returned no prefix")
            return findings


def _ask_cold(url: str, prompt: str) -> tuple[str, int]:
    """Return the greedy answer without local prefixes, and the hit tokens from a prefix server."""
    requests.post(f"{url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()
    while _published(url)["waiting_bytes"]:
        pass
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    reply = requests.post(
        f"{url}/generate", json={"text": prompt, "sampling_params": params}, timeout=120
    )
    reply.raise_for_status()
    answer = reply.json()
    while _published(url)["waiting_bytes"]:
        pass
    return str(answer["text"]), int(answer["meta_info"]["kvspec"]["hit_tokens"]["remote"])


def _published(url: str) -> dict[str, int]:
    info = requests.get(f"{url}/server_info", timeout=60).json()
    remote: dict[str, int] = info["internal_states"][0]["kvspec"]["prefix_tiers"]["remote"]
    return remote
