"""Prefixes that another server computed come from a prefix server. Answers are plain SGLang's, also
where the prefix server stalls, dies and restarts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hardening.store_attack import attack_store
from harness.arrival import run_staggered
from harness.client import GenerateClient
from harness.models import DEMO_MODEL
from harness.prefix_hits import PAGE_SIZE, Pairs, check, full_tokens, tasks_of
from harness.scenarios import STRICT_CHECKS
from harness.servers import Announce, ServerSpec, ServerSwitch
from harness.suite import run_one_by_one

from kvspec_testkit.servers.prefix_server_process import PrefixServerProcess

pytestmark = pytest.mark.server

POOL = "--max-total-tokens=8192"
# A long limit for busy machines. Requests wait that long in vain only once.
WAIT = "--kvspec-prefix-wait-ms=20000"
NUM_TASKS = 10


@pytest.fixture(scope="module")
def expected(crowd_answers: Pairs) -> Pairs:
    """The longest prompts, with plain SGLang's answers."""
    return sorted(crowd_answers, key=lambda pair: -len(pair[0].input_ids))[:NUM_TASKS]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixServerProcess]:
    with PrefixServerProcess(tmp_path_factory.mktemp("prefixes")) as store:
        yield store


@pytest.fixture(scope="module")
def spec(store: PrefixServerProcess) -> ServerSpec:
    arguments = (POOL, "--kvspec", WAIT, f"--kvspec-prefix-server={store.address}")
    return ServerSpec(DEMO_MODEL, arguments, STRICT_CHECKS.environment)


@pytest.fixture
def client(servers: ServerSwitch, spec: ServerSpec, expected: Pairs) -> GenerateClient:
    return servers.use(spec)


def report_of(client: GenerateClient) -> dict[str, Any]:
    return dict(client.kvspec_report()["prefix_tiers"]["remote"])


def wait_until_published(client: GenerateClient) -> None:
    while report_of(client)["waiting_bytes"]:
        pass


def wait_until_live(client: GenerateClient, is_live: bool) -> None:
    while report_of(client)["is_live"] is not is_live:
        pass


def test_a_fresh_server_finds_what_another_computed(
    client: GenerateClient,
    servers: ServerSwitch,
    spec: ServerSpec,
    expected: Pairs,
    announce: Announce,
) -> None:
    tasks = tasks_of(expected)
    check(run_one_by_one(client, tasks, lambda: None), expected)
    wait_until_published(client)
    published = report_of(client)["counters"]["pages_published"]
    assert published > 0
    servers.kill()
    fresh = servers.use(spec)
    wait_until_live(fresh, True)
    hits = check(run_staggered(fresh, tasks, lambda: None), expected)
    announce(f"prefix server: {published} pages published, hits {dict(hits)}")
    # All full pages were hit: in the store, or in the KV cache after a fetch for another prompt.
    assert hits["resident"] + hits["remote"] == sum(full_tokens(task) for task in tasks)
    assert hits["remote"] > 0
    counters = report_of(fresh)["counters"]
    assert counters["pages_fetched"] * PAGE_SIZE >= hits["remote"]
    assert fresh.kvspec_report()["counters"]["hit_tokens"]["remote"] == hits["remote"]


def test_a_store_that_stalls_or_dies_costs_hits_and_no_answer(
    client: GenerateClient, store: PrefixServerProcess, expected: Pairs
) -> None:
    tasks = tasks_of(expected)
    wait_until_live(client, True)
    client.flush_cache()
    store.stall()
    hits = check(run_staggered(client, tasks, lambda: None), expected)
    assert hits["remote"] == 0
    wait_until_live(client, False)
    store.kill()
    client.flush_cache()
    assert check(run_one_by_one(client, tasks, lambda: None), expected)["remote"] == 0
    store.start()
    wait_until_live(client, True)
    client.flush_cache()
    hits = check(run_one_by_one(client, tasks, lambda: None), expected)
    assert hits["remote"] > 0


def test_hostile_messages_cost_a_prefix_server_nothing(
    client: GenerateClient, store: PrefixServerProcess, expected: Pairs
) -> None:
    tasks = tasks_of(expected)
    wait_until_live(client, True)
    attack_store(store.address, 500, seed=1)
    assert store.is_alive
    client.flush_cache()
    hits = check(run_one_by_one(client, tasks, lambda: None), expected)
    assert hits["remote"] > 0


def test_other_weights_have_no_use_for_the_store(client: GenerateClient, expected: Pairs) -> None:
    reply = requests.post(
        f"{client.base_url}/update_weights_from_disk",
        json={"model_path": str(DEMO_MODEL)},
        timeout=60,
    )
    assert reply.json()["success"], reply.text
    before = report_of(client)
    assert before["is_stale"]
    # The test loads the same weights, so answers do not change.
    hits = check(run_one_by_one(client, tasks_of(expected), lambda: None), expected)
    assert hits["remote"] == 0
    after = report_of(client)["counters"]
    assert after["lookups"] == before["counters"]["lookups"]
    assert after["pages_published"] == before["counters"]["pages_published"]
