"""More requests than their residuals have room for, and traffic that never lets up: every answer
is plain SGLang's, and nothing stays behind.

A short version runs with the other tests; `make soak` goes on for half an hour.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from harness.faults import fault_environment
from harness.models import DEMO_MODEL
from harness.references import PlainReference, Setting, Workload
from harness.scenarios import FORCED_RETRACTION, PREFIX_HITS, STRICT_CHECKS
from harness.servers import Announce, ServerSwitch
from harness.soak import Soak
from harness.soak_report import write_soak_report
from harness.suite import Task, TokenIds

pytestmark = pytest.mark.server

# With a follower each, that shares a prefix: short ones are their own followers.
LENGTHS = tuple(100 + 13 * i for i in range(32))
CONCURRENT = 2 * len(LENGTHS)
# Residuals of all running requests need at least so many times the cache.
OVERCOMMIT = 5
CACHE_PAGES = 24
SEED = 7


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, servers: ServerSwitch, announce: Announce
) -> list[tuple[Task, TokenIds]]:
    """Every task with the answer of plain SGLang, alone on its server."""
    workload = Workload(DEMO_MODEL, LENGTHS, max_new_tokens=32)
    cache = request.config.getoption("--reference-cache")
    reference = PlainReference(servers, workload, (PREFIX_HITS,), announce, cache)
    followers = [family.follower for family in reference.suite.families]
    tasks = (*reference.suite.prompts, *followers)
    return [(task, reference.answer(task)) for task in tasks]


@pytest.fixture(scope="module")
def prefix_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(params=["staggered", pytest.param("rounds", marks=pytest.mark.identity)])
def soak(
    request: pytest.FixtureRequest,
    servers: ServerSwitch,
    answers: list[tuple[Task, TokenIds]],
    prefix_folder: Path,
) -> Soak:
    """Against a server with a small residual cache that checks its memory at every step, and
    retracts now and then."""
    setting = Setting("exact", "log4", request.param)
    # So that answers take many rounds.
    short = ("--kvspec-draft-len=4",) if request.param == "rounds" else ()
    # After a flush prefixes are on disk only, and come back while others come and go.
    tiers = ("--kvspec-prefix-host-gb=0.1", f"--kvspec-prefix-dir={prefix_folder}")
    running = f"--max-running-requests={CONCURRENT}"
    drafting = setting.server(DEMO_MODEL, running, *tiers, *short)
    small = fault_environment(KVSPEC_CACHE_PAGES=CACHE_PAGES)
    spec = FORCED_RETRACTION.server(STRICT_CHECKS.server(replace(drafting, environment=small)))
    return Soak(servers.use(spec), answers, concurrent=CONCURRENT, seed=SEED)


def check(soak: Soak) -> None:
    assert not soak.result.mismatches, "\n".join(soak.result.mismatches)
    assert not soak.result.leaks, "\n".join(soak.result.leaks)


def test_a_crowd_whose_residuals_exceed_the_cache(soak: Soak, announce: Announce) -> None:
    soak.crowd()
    announce(f"crowd: {soak.result}")
    check(soak)
    assert soak.result.requests == CONCURRENT
    assert soak.result.retractions > 0
    assert soak.result.cache_pages == CACHE_PAGES
    assert soak.result.peak_encoded >= OVERCOMMIT * CACHE_PAGES
    assert soak.result.bytes_fetched > 0


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
