"""Bounds of remembered pages, of look-ups and of back-off pauses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_kvspec.kv.prefix_store import chain_links
from sglang_kvspec.runtime.remote_prefixes import RemotePrefixes, publisher
from sglang_kvspec.runtime.remote_prefixes.circuit_breaker import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    CircuitBreaker,
)
from sglang_kvspec.runtime.remote_prefixes.publisher import Publisher
from sglang_kvspec.transport.prefixes.frames import MAX_SEEK_TOKENS


def test_pauses_double_up_to_the_longest_and_one_page_ends_them() -> None:
    trust, now_s = CircuitBreaker(), 0.0
    pauses = []
    for _ in range(8):
        trust.record_failure(now_s)
        # A second failure in the same pause, of a request that was asked for before it.
        trust.record_failure(now_s)
        pause_s = next(s for s in range(1, 100) if trust.allows(now_s + s))
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE_S, LONGEST_PAUSE_S)
    trust.record_failure(now_s)
    assert not trust.allows(now_s)
    trust.record_success()
    assert trust.allows(now_s)
    trust.record_failure(now_s)
    assert trust.allows(now_s + FIRST_PAUSE_S)


def test_the_known_pages_are_the_newest(monkeypatch: Any) -> None:
    monkeypatch.setattr(publisher, "_MAX_KNOWN", 3)
    links = list(chain_links(range(4), 1))
    known = Publisher(100)
    known.learn([link.key for link in links[:3]])
    known.learn([links[0].key, links[3].key])
    assert [known.is_known(link) for link in links] == [True, False, True, True]


def test_no_more_tokens_are_looked_up_than_a_frame_takes() -> None:
    calls: list[tuple[Any, ...]] = []
    link = SimpleNamespace(is_live=True, seek=lambda *args, anchors_first: calls.append(args))
    remote = RemotePrefixes(
        link,  # type: ignore[arg-type]
        page_bytes=1,
        wait_s=1.0,
        landing_bytes=10**6,
        queue_bytes=0,
    )
    remote.ask("r", list(chain_links(range(MAX_SEEK_TOKENS + 640), 64)))
    ((_, chain, keys),) = calls
    assert len(keys) == MAX_SEEK_TOKENS // 64
    assert len(chain.tokens) == 8 * MAX_SEEK_TOKENS
