"""More requests than their residuals have room for, and continuous traffic: every answer is plain
SGLang's, and no page stays allocated.

A short version runs with the other tests; `make soak` runs for half an hour.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import requests
from harness.crowding import CACHE_PAGES, crowded_server
from harness.servers import Announce, ServerSwitch
from harness.soak import CROWD_SIZE, Soak
from harness.soak_report import write_soak_report
from harness.suite import Task, TokenIds

pytestmark = pytest.mark.server

# Residuals of all running requests need at least this many times the cache.
OVERCOMMIT = 5
SEED = 7


@pytest.fixture
def soak(
    soak_schedule: str,
    servers: ServerSwitch,
    soak_fault_file: Path,
    prefix_folder: Path,
    crowd_answers: list[tuple[Task, TokenIds]],
) -> Soak:
    client = servers.use(crowded_server(soak_schedule, soak_fault_file, prefix_folder))
    return Soak(client, crowd_answers, concurrent=CROWD_SIZE, seed=SEED)


def check(soak: Soak) -> None:
    assert not soak.result.mismatches, "\n".join(soak.result.mismatches)
    assert not soak.result.leaks, "\n".join(soak.result.leaks)


def test_a_crowd_whose_residuals_exceed_the_cache(soak: Soak, announce: Announce) -> None:
    soak.crowd()
    announce(f"crowd: {soak.result}")
    check(soak)
    assert soak.result.requests == CROWD_SIZE
    assert soak.result.retractions > 0
    assert soak.result.cache_pages == CACHE_PAGES
    assert soak.result.peak_encoded >= OVERCOMMIT * CACHE_PAGES
    assert soak.result.bytes_fetched > 0
    check_pressure(soak, announce)


def check_pressure(soak: Soak, announce: Announce) -> None:
    """Check that requests without room in the store waited, where SGLang alone would have admitted
    them."""
    state = soak.report()
    announce(f"speeds: {state['speeds']}, pressure: {state['pressure']}")
    assert state["pools"]["limited_by"] == "host memory"
    pressure, speeds = state["pressure"], state["speeds"]
    assert pressure["most_waiting_for_pages"] >= CROWD_SIZE // 4
    assert pressure["waiting_for_pages"] == 0
    # All retractions were forced.
    assert pressure["retracted"]["test"] > 0
    assert pressure["retracted"]["memory"] == pressure["out_of_memory"] == 0
    assert speeds["link_observations"] > 0
    assert speeds["iteration_observations"] > 0
    metrics = requests.get(f"{soak.client.base_url}/metrics", timeout=60).text
    assert value_of("link_bytes_per_second", metrics) == speeds["link_bytes_per_s"]
    assert value_of("requests_waiting_for_pages", metrics) == 0


def value_of(name: str, metrics: str) -> float:
    found = re.search(rf"^sglang:kvspec_{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_requests_that_come_and_go(soak: Soak, announce: Announce) -> None:
    for _ in range(2):
        soak.random_round(48)
    announce(f"come and go: {soak.result}")
    check(soak)
    assert soak.result.cut_short > 0
    assert soak.result.hits_from_disk > 0


@pytest.mark.soak
def test_half_an_hour(request: pytest.FixtureRequest, soak: Soak, announce: Announce) -> None:
    started, seconds = time.monotonic(), request.config.getoption("--soak-seconds")
    path: Path | None = request.config.getoption("--soak-report")
    while (elapsed := time.monotonic() - started) < seconds:
        soak.random_round(256)
        announce(f"{elapsed:.0f} s: {soak.result}")
        if path is not None:
            write_soak_report(path, soak.result, time.monotonic() - started)
        check(soak)
