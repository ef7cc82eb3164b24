"""Addresses from which prefill servers send, asked of their bootstrap servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import requests

QUERY_TIMEOUT_S = 2.0
# Seconds between two queries for a prefill server that is not there.
QUERY_PERIOD_S = 1.0
# Most queries at once. Clients name the servers in their requests, and all of them may be silent.
MAX_QUERIES = 16
MAX_REPLY_BYTES = 1 << 16


class Answer(NamedTuple):
    """Ranks of a prefill server to dial. addresses: of first_rank and the ranks after it; empty if
    they are not known, and trouble says why. part: number and count of the equal shares of their KV
    heads, of which each rank sends one."""

    addresses: tuple[str, ...]
    first_rank: int = 0
    part: tuple[int, int] = (0, 1)
    trouble: str = ""


class Asker(NamedTuple):
    """Rank `rank` of the `size` ranks of a decode server, with num_kv_heads KV heads."""

    rank: int = 0
    size: int = 1
    num_kv_heads: int = 1


def query_route(bootstrap_addr: str, asker: Asker) -> Answer:
    """Ask a bootstrap server for the addresses of those ranks that have the asker's KV heads. One
    query asks for the number of ranks, and one for each rank. A query takes QUERY_TIMEOUT_S, or
    twice that, at most. Raises the errors of the connection and of malformed answers."""
    try:
        num_ranks = size_in(_get_route(bootstrap_addr, -1, -1))
        ranks = ranks_for(asker, num_ranks)
        found = [address_in(_get_route(bootstrap_addr, 0, rank)) for rank in ranks]
    except _NoRoute as error:
        return Answer((), trouble=str(error))
    return Answer(tuple(found), ranks.start, part_for(asker, num_ranks))


def ranks_for(asker: Asker, num_ranks: int) -> range:
    """Return those of a prefill server's num_ranks ranks that have the asker's KV heads. If the
    numbers do not fit, return one rank, which refuses the asker with a reason."""
    each, rest = divmod(num_ranks, asker.size)
    if rest or each > asker.num_kv_heads:
        first = asker.rank * num_ranks // asker.size
        return range(first, first + 1)
    return range(asker.rank * each, (asker.rank + 1) * each)


def part_for(asker: Asker, num_ranks: int) -> tuple[int, int]:
    """Return which share of a prefill rank's KV heads the asker has, and of how many shares. (0, 1)
    unless the decode server has more ranks."""
    count, rest = divmod(asker.size, num_ranks)
    return (0, 1) if rest or not count else (asker.rank % count, count)


class _NoRoute(Exception):
    """Useless answer of a bootstrap server. The message says what it was."""


def _get_route(bootstrap_addr: str, others: int, rank: int) -> Any:
    """Return what a bootstrap server says of a rank, or of its server if both numbers are -1."""
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_pp_rank")
    deadline_s = time.monotonic() + QUERY_TIMEOUT_S
    with requests.get(
        f"http://{bootstrap_addr}/route",
        params=dict.fromkeys(names, others) | {"target_tp_rank": rank},
        timeout=QUERY_TIMEOUT_S,
        allow_redirects=False,
        stream=True,
    ) as reply:
        body = b""
        for part in reply.iter_content(4096):
            body += part
            if len(body) > MAX_REPLY_BYTES or time.monotonic() > deadline_s:
                raise _NoRoute("the bootstrap server's answer is too long or too slow")
    if reply.status_code != 200:
        raise _NoRoute(f"the bootstrap server answered {reply.status_code}: {body[:200]!r}")
    return json.loads(body)


def size_in(found: Any) -> int:
    """Return the number of ranks in an answer. Raises ValueError if there is none."""
    size = found.get("attn_tp_size") if type(found) is dict else None
    if type(size) is not int or size < 1:
        raise ValueError(f"the bootstrap server named no number of ranks: {found!r:.200}")
    return size


def address_in(found: Any) -> str:
    """Return the address in an answer. Raises ValueError if there is none."""
    host, port = (found.get("rank_ip"), found.get("rank_port")) if type(found) is dict else (0, 0)
    if type(host) is not str or type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError(f"the bootstrap server named no address: {found!r:.200}")
    return f"tcp://{host}:{port}"


class Directory:
    """Queries of bootstrap servers on threads of their own: no call waits for a silent server."""

    def __init__(
        self,
        on_news: Callable[[], None],
        query: Callable[[str], Answer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_news: called, on a thread of the directory, when there is something for take(). query:
        query_route of this server."""
        self._on_news, self._query, self._clock = on_news, query, clock
        self._lock = threading.Lock()
        self._asked_s: dict[str, float] = {}
        self._asking: set[str] = set()
        self._answers: dict[str, Answer] = {}

    def ask(self, bootstrap_addr: str) -> None:
        """Start a query of a server, unless one is under way or less than QUERY_PERIOD_S old, or
        MAX_QUERIES are under way."""
        now_s = self._clock()
        with self._lock:
            asked = {a: s for a, s in self._asked_s.items() if now_s - s < QUERY_PERIOD_S}
            self._asked_s = asked
            is_due = bootstrap_addr not in asked and bootstrap_addr not in self._asking
            if not is_due or len(self._asking) >= MAX_QUERIES:
                return
            asked[bootstrap_addr] = now_s
            self._asking.add(bootstrap_addr)
        threading.Thread(target=self._run, args=(bootstrap_addr,), daemon=True).start()

    def take(self, bootstrap_addr: str) -> Answer | None:
        """Return a server's answer; None if it has not answered since the last call."""
        with self._lock:
            return self._answers.pop(bootstrap_addr, None)

    def _run(self, bootstrap_addr: str) -> None:
        try:
            answer = self._query(bootstrap_addr)
        except Exception as error:
            # Whatever an unknown server answers must end this query only.
            answer = Answer((), trouble=f"{type(error).__name__}: {error}")
        with self._lock:
            self._asking.discard(bootstrap_addr)
            self._answers[bootstrap_addr] = answer
        self._on_news()
