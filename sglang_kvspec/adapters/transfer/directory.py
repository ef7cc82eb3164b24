"""Where prefill servers send from, as their bootstrap servers tell."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import requests

QUERY_TIMEOUT_S = 2.0
# A prefill server that is not there is asked for at most so often.
QUERY_PERIOD_S = 1.0
# Whoever sends requests names the servers: so many may be silent at once.
MAX_QUERIES = 16
MAX_REPLY_BYTES = 1 << 16


class Answer(NamedTuple):
    """addresses: to dial, of ranks first_rank and those that follow it; none where they are not
    known, and trouble says why. part: which of how many equal shares of their KV heads is wanted of
    each."""

    addresses: tuple[str, ...]
    first_rank: int = 0
    part: tuple[int, int] = (0, 1)
    trouble: str = ""


class Asker(NamedTuple):
    """Rank `rank` of `size` of a decode server, with so many KV heads."""

    rank: int = 0
    size: int = 1
    num_kv_heads: int = 1


def query_route(bootstrap_addr: str, asker: Asker) -> Answer:
    """Ask a bootstrap server where those ranks of its server send from that have the asker's KV
    heads. Takes QUERY_TIMEOUT_S, or twice that, for the number of ranks and for each of them.
    Raises what may go wrong on the way."""
    try:
        num_ranks = size_in(_get_route(bootstrap_addr, -1, -1))
        ranks = ranks_for(asker, num_ranks)
        found = [address_in(_get_route(bootstrap_addr, 0, rank)) for rank in ranks]
    except _NoRoute as error:
        return Answer((), trouble=str(error))
    return Answer(tuple(found), ranks.start, part_for(asker, num_ranks))


def ranks_for(asker: Asker, num_ranks: int) -> range:
    """Those of a prefill server of so many ranks that have the asker's KV heads. Where the numbers
    do not fit, one that will refuse it in words."""
    each, rest = divmod(num_ranks, asker.size)
    if rest or each > asker.num_kv_heads:
        first = asker.rank * num_ranks // asker.size
        return range(first, first + 1)
    return range(asker.rank * each, (asker.rank + 1) * each)


def part_for(asker: Asker, num_ranks: int) -> tuple[int, int]:
    """Which of how many shares of a rank's KV heads the asker has, where there are fewer of
    those."""
    count, rest = divmod(asker.size, num_ranks)
    return (0, 1) if rest or not count else (asker.rank % count, count)


class _NoRoute(Exception):
    """A bootstrap server that says nothing of use, and what it says."""


def _get_route(bootstrap_addr: str, others: int, rank: int) -> Any:
    """What it says of a rank or, where both numbers are -1, of its server."""
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
                raise _NoRoute("its answer is too long, or comes too slowly")
    if reply.status_code != 200:
        raise _NoRoute(f"it answers {reply.status_code}: {body[:200]!r}")
    return json.loads(body)


def size_in(found: Any) -> int:
    """Raises ValueError for an answer that names no number of ranks."""
    size = found.get("attn_tp_size") if type(found) is dict else None
    if type(size) is not int or size < 1:
        raise ValueError(f"it names no number of ranks: {found!r:.200}")
    return size


def address_in(found: Any) -> str:
    """Raises ValueError for an answer that names no address."""
    host, port = (found.get("rank_ip"), found.get("rank_port")) if type(found) is dict else (0, 0)
    if type(host) is not str or type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError(f"it names no address: {found!r:.200}")
    return f"tcp://{host}:{port}"


class Directory:
    """Asks on threads of its own: a server that is silent holds nobody up."""

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
        """Have a server asked, unless that is under way, was done a moment ago, or too many others
        are."""
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
        """What a server said that was asked; None where it has said nothing since the last call."""
        with self._lock:
            return self._answers.pop(bootstrap_addr, None)

    def _run(self, bootstrap_addr: str) -> None:
        try:
            answer = self._query(bootstrap_addr)
        except Exception as error:
            # Nothing that a stranger answers ends more than the question.
            answer = Answer((), trouble=f"{type(error).__name__}: {error}")
        with self._lock:
            self._asking.discard(bootstrap_addr)
            self._answers[bootstrap_addr] = answer
        self._on_news()
