"""A prefill server and a decode server answer like one server."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from fleet import PAIRS, Fleet
from live_server import Answers
from serving.live_server import kvspec_of
from ttkt.disaggregated_requests import TIMEOUT_S, ask

from kvspec_testkit.servers.server_pair import ServerPair
from kvspec_testkit.servers.transfer_report import read_transfer_report

AT_ONCE = 8
# A decode server frees a request a moment after its last token.
SETTLE_TIMEOUT_S, POLL_S = 20.0, 0.2

pytestmark = pytest.mark.servers(*PAIRS)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, fleet: Fleet) -> ServerPair:
    return fleet.pair(request.param)


@pytest.mark.parametrize("at_once", [1, AT_ONCE])
def test_a_pair_answers_like_one_server(
    pair: ServerPair, at_once: int, prompts: list[list[int]], new_tokens: int, expected: Answers
) -> None:
    url = f"{pair.prefill.base_url}/flush_cache?timeout=30"
    requests.post(url, timeout=TIMEOUT_S).raise_for_status()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda prompt: ask(pair, prompt, new_tokens), prompts))
    assert [list(answer.output_ids) for answer in answers] == expected
    early = [
        read_transfer_report(answer.meta).transfer.drafts_before_residuals for answer in answers
    ]
    assert sum(early) > 0, "no draft came before residuals"


def test_a_decode_server_keeps_nothing(pair: ServerPair, prompts: list[list[int]]) -> None:
    ask(pair, prompts[0], 8)
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while (report := report_of(pair))["pools"]["window_pages_used"]:
        assert time.monotonic() < deadline, report["pools"]
        time.sleep(POLL_S)
    assert report["transfer"]["drafts_on_anchors"] > 0
    assert {state for state, count in report["page_states"].items() if count} == {"ABSENT"}


@pytest.mark.parametrize("name", ["hosted pair", "packed pair"])
def test_residuals_of_a_hosted_pair_come_from_host_memory(fleet: Fleet, name: str) -> None:
    report = report_of(fleet.pair(name))
    assert report["pools"]["residual_store_pages"] > report["pools"]["residual_cache_pages"]
    assert report["bytes_fetched"] > 0


def report_of(pair: ServerPair) -> dict[str, Any]:
    reply = requests.get(f"{pair.decode.base_url}/server_info", timeout=TIMEOUT_S)
    return kvspec_of(reply.json())
