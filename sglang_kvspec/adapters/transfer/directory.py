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
    """address: to dial; None where there is none, and trouble says why."""

    address: str | None
    trouble: str = ""


def query_route(bootstrap_addr: str, rank: int = 0) -> Answer:
    """Ask a bootstrap server where a rank of its server sends from. Takes QUERY_TIMEOUT_S or twice
    that. Raises what may go wrong on the way."""
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_pp_rank")
    deadline_s = time.monotonic() + QUERY_TIMEOUT_S
    with requests.get(
        f"http://{bootstrap_addr}/route",
        params=dict.fromkeys(names, 0) | {"target_tp_rank": rank},
        timeout=QUERY_TIMEOUT_S,
        allow_redirects=False,
        stream=True,
    ) as reply:
        body = b""
        for part in reply.iter_content(4096):
            body += part
            if len(body) > MAX_REPLY_BYTES or time.monotonic() > deadline_s:
                return Answer(None, "its answer is too long, or comes too slowly")
    if reply.status_code != 200:
        return Answer(None, f"it answers {reply.status_code}: {body[:200]!r}")
    return Answer(address_in(json.loads(body)))


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
        query: Callable[[str], Answer] = query_route,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_news: called, on a thread of the directory, when there is something for take()."""
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
            answer = Answer(None, f"{type(error).__name__}: {error}")
        with self._lock:
            self._asking.discard(bootstrap_addr)
            self._answers[bootstrap_addr] = answer
        self._on_news()
