"""Requests to two servers while faults occur between them."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import requests
from harness.client import Output
from harness.comparison import compare
from harness.pair import Pair, PairClient, wait_until
from harness.references import PlainReference
from harness.suite import Task

from kvspec_testkit.servers.server_process import ServerProcess
from kvspec_testkit.transport.proxy import Proxy


class Round:
    """Tasks that are sent at once, and the outcome of each."""

    def __init__(self, client: PairClient, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._pool = ThreadPoolExecutor(len(tasks))
        self._answers: list[Future[Output]] = [
            self._pool.submit(client.generate, task.input_ids, task.max_new_tokens)
            for task in tasks
        ]

    @property
    def num_done(self) -> int:
        return sum(answer.done() for answer in self._answers)

    def finish(self, reference: PlainReference) -> list[str]:
        """Return the errors of the decode server for requests that failed. Raises AssertionError
        for an answer that differs from plain SGLang's."""
        self._pool.shutdown()
        right: list[tuple[Task, Output]] = []
        errors: list[str] = []
        for task, answer in zip(self._tasks, self._answers, strict=True):
            error = answer.exception()
            if error is None:
                right.append((task, answer.result()))
            elif isinstance(error, requests.HTTPError):
                errors.append(str(error))
            else:
                raise error
        mismatches = compare(right, [reference.answer(task) for task, _ in right])
        assert not mismatches, "\n".join(map(str, mismatches))
        return errors


def assert_nothing_left(client: PairClient) -> None:
    """Check that both servers are healthy, and hold no pages of finished requests."""
    for side in (client, client.prefill):
        requests.get(f"{side.base_url}/health", timeout=60).raise_for_status()
    wait_until(lambda: not _held(client.kvspec_report()), "the decode server holds nothing", 90)
    client.flush_cache()
    wait_until(lambda: not _held(client.prefill.kvspec_report()), "nor does the prefill server")


def _held(report: dict[str, Any]) -> dict[str, int]:
    states, pools = report["page_states"], report["pools"]
    kept = {name: count for name, count in states.items() if name != "ABSENT"}
    kept |= {name: pools[name] for name in ("num_pages_allocated", "window_pages_used")}
    return {name: count for name, count in kept.items() if count}


def lost_sessions(report: dict[str, Any]) -> int:
    """Return the number of sessions that the decode server has lost, over all its links."""
    return sum(link["sessions"]["lost"] for link in report["transfer"]["links"].values())


def cut_in_use(proxy: Proxy, times: int) -> None:
    """Cut the connections through the proxy, each time once a new one has carried bytes."""
    for _ in range(times):
        connections, forwarded = proxy.num_connections, proxy.num_forwarded
        proxy.cut()
        wait_until(lambda seen=connections: proxy.num_connections > seen, "a new connection")
        wait_until(lambda seen=forwarded: proxy.num_forwarded > seen, "bytes through it")


def residuals_on_their_way(client: PairClient) -> bool:
    return bool(client.kvspec_report()["page_states"]["IN_FLIGHT"])


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """Stop all processes of the server inside the context."""
    server.signal_group(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal_group(signal.SIGCONT)


def register(pair: Pair, address: str, rank: int = 0) -> None:
    """Tell the bootstrap server that a rank of its prefill server sends from `address`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    ranks = ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp")
    payload = dict.fromkeys((f"{name}_size" for name in ranks), 1)
    payload |= dict.fromkeys((f"{name}_rank" for name in ranks), 0)
    payload["attn_tp_rank"] = rank
    reply = requests.put(
        f"{pair.bootstrap_url}/route",
        json={
            **payload,
            "rank_ip": host,
            "rank_port": int(port),
            "page_size": 64,
            "kv_cache_dtype": "auto",
            "load_balance_method": "follow_bootstrap_room",
        },
        timeout=10,
    )
    reply.raise_for_status()


def registered(pair: Pair, rank: int = 0) -> str:
    """Return the address from which a rank of the prefill server sends, by the bootstrap server."""
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_pp_rank")
    found = requests.get(
        f"{pair.bootstrap_url}/route",
        params=dict.fromkeys(names, 0) | {"target_tp_rank": rank},
        timeout=10,
    ).json()
    return f"tcp://{found['rank_ip']}:{found['rank_port']}"
