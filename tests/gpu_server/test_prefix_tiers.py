"""A prefix gives the same answer wherever it comes from: resident, host memory, disk, a prefix
server, or anchors that stayed in GPU memory."""

from __future__ import annotations

import pytest
from fleet import PAGE, Fleet
from live_server import Answers, LiveServer

# The residuals of a prompt take at most a second, but always many draft steps.
SLOW_BYTES_PER_S = 2e6


@pytest.fixture(scope="module")
def filled(
    fleet: Fleet, prompts: list[list[int]], new_tokens: int, expected: Answers
) -> LiveServer:
    """Server whose pool is much smaller than the prompts, so that prefixes leave it, to all
    tiers."""
    server = fleet["tiers"]
    server.wait_until_live()
    assert server.ask(prompts, new_tokens, at_once=False) == expected
    server.wait_until_spilled()
    return server


@pytest.mark.servers("tiers")
def test_prefixes_come_back_from_host_memory(
    filled: LiveServer, prompts: list[list[int]], new_tokens: int, expected: Answers
) -> None:
    assert filled.ask(prompts, new_tokens, at_once=False) == expected
    assert filled.ask(prompts[-1:], new_tokens, at_once=False) == expected[-1:]
    assert filled.ask(prompts, new_tokens, at_once=True) == expected
    reported = filled.report()["counters"]["hit_tokens"]
    for tier in ("resident", "host"):
        assert min(filled.hits[tier], reported[tier]) > 0


@pytest.fixture(scope="module")
def fresh(fleet: Fleet, filled: LiveServer) -> Fleet:
    """The fleet, after `filled` has left prefixes on disk and on the prefix server. Then it stops,
    because a folder on disk has one writer."""
    fleet.stop("tiers")
    if fleet.platform.on_gpu:
        fleet.launch("fresh disk")
    return fleet


@pytest.mark.servers("fresh remote", "fresh host")
@pytest.mark.parametrize("tier", ["remote", "host", "disk"])
def test_a_fresh_server_finds_prefixes(
    fresh: Fleet, tier: str, prompts: list[list[int]], new_tokens: int, expected: Answers
) -> None:
    server = fresh[f"fresh {tier}"]
    if tier == "remote":
        server.wait_until_live()
    assert server.ask(prompts, new_tokens, at_once=False) == expected
    assert server.ask(prompts, new_tokens, at_once=True) == expected
    assert min(server.hits[tier], server.report()["counters"]["hit_tokens"][tier]) > 0


def test_the_small_cache_was_in_use(fresh: Fleet) -> None:
    pools = fresh["fresh host"].report()["pools"]
    assert pools["residual_store_pages"] == fresh.room.small // PAGE
    assert pools["residual_cache_pages"] == fresh.room.cache_pages


@pytest.mark.servers("early")
@pytest.mark.parametrize("at_once", [False, True], ids=["one at a time", "at once"])
def test_requests_start_on_anchors(
    fresh: Fleet, at_once: bool, prompts: list[list[int]], new_tokens: int, expected: Answers
) -> None:
    server = fresh["early"]
    fresh.slow_link.bytes_per_s = SLOW_BYTES_PER_S
    server.flush()
    server.wait_until_live()
    before = server.remote_counters()
    assert server.ask(prompts, new_tokens, at_once=at_once) == expected
    now = server.remote_counters()
    for counter in ("early", "drafts_on_anchors"):
        assert now[counter] > before[counter], counter


@pytest.mark.servers("kept", "kept hosted", "kept packed")
@pytest.mark.parametrize("name", ["kept", "kept hosted", "kept packed"])
def test_kept_anchors_need_only_residuals(
    fresh: Fleet, name: str, prompts: list[list[int]], new_tokens: int, expected: Answers
) -> None:
    server = fresh[name]
    assert server.ask(prompts, new_tokens, at_once=False) == expected
    server.wait_until_spilled()
    assert server.ask(prompts, new_tokens, at_once=False) == expected
    # The last prompts are in host memory, the first ones on disk.
    assert server.ask(prompts[::-1], new_tokens, at_once=False) == expected[::-1]
    assert server.ask(prompts, new_tokens, at_once=True) == expected
    report = server.report()
    assert all(num_tokens > 0 for num_tokens in report["counters"]["kept_anchors"].values())
    loaded = report["prefix_tiers"]["loaded_bytes"]
    assert loaded["residuals"] > 0
    assert loaded["anchors"] == 0


@pytest.mark.servers("int8 tiers")
def test_int8_prefixes_come_back(
    server: LiveServer, prompts: list[list[int]], new_tokens: int, expected_int8: Answers
) -> None:
    assert server.ask(prompts, new_tokens, at_once=False) == expected_int8
    assert server.ask(prompts, new_tokens, at_once=False) == expected_int8
    assert server.hits["host"] > 0
