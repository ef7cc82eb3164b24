"""A request starts on the anchors of its prefix while residuals are on the link from a prefix
server. Its answer is plain SGLang's, also where residuals do not arrive."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from harness.client import GenerateClient
from harness.faults import fault_environment
from harness.models import DEMO_MODEL
from harness.prefix_hits import Pairs, ask_all_at_once, check, full_tokens, longest_apart, tasks_of
from harness.scenarios import STRICT_CHECKS
from harness.servers import Announce, ServerSpec, ServerSwitch
from harness.suite import run_one_by_one

from kvspec_testkit.servers.prefix_server_process import PrefixServerProcess
from kvspec_testkit.transport.proxy import Proxy

pytestmark = pytest.mark.server

POOL = "--max-total-tokens=8192"
WAIT = "--kvspec-prefix-wait-ms=20000"
NUM_TASKS = 6
# Each of these prompts has about 3 MB of residuals, and a seventh of that of anchors.
SLOW_BYTES_PER_S = 2e6
DAMAGED_EVERY = 1_300_000
PATIENCE_S = 60.0
# Schedules of a CPU, and pre-launched rounds as on a GPU.
AHEAD = fault_environment(KVSPEC_AHEAD_SEED=11)
SERVERS = {
    "ahead": (("--kvspec-schedule=rounds", "--kvspec-host-gb=0"), AHEAD),
    "staggered": ((), ()),
    "ranks": (("--tp-size=2",), ()),
    "rounds of ranks": (("--tp-size=2", "--kvspec-schedule=rounds"), ()),
}
FIRST, *OTHERS = SERVERS


@pytest.fixture(scope="module")
def expected(crowd_answers: Pairs) -> Pairs:
    """Long prompts that have no page in common, with plain SGLang's answers."""
    return longest_apart(crowd_answers, NUM_TASKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[PrefixServerProcess]:
    with PrefixServerProcess(folder) as store:
        yield store


@pytest.fixture(scope="module")
def proxy(store: PrefixServerProcess) -> Iterator[Proxy]:
    proxy = Proxy(store.address)
    yield proxy
    proxy.close()


@pytest.fixture(
    scope="module",
    params=[FIRST, *(pytest.param(name, marks=pytest.mark.identity) for name in OTHERS)],
)
def spec(proxy: Proxy, request: pytest.FixtureRequest) -> ServerSpec:
    address = f"--kvspec-prefix-server={proxy.address}"
    more, environment = SERVERS[request.param]
    arguments = (POOL, "--enable-metrics", "--kvspec", WAIT, address, *more)
    return ServerSpec(DEMO_MODEL, arguments, (*STRICT_CHECKS.environment, *environment))


@pytest.fixture
def client(
    servers: ServerSwitch, spec: ServerSpec, proxy: Proxy, expected: Pairs
) -> GenerateClient:
    """Client of a server that has published all prompts and holds none of them, over a slow
    link."""
    client = servers.use(spec)
    proxy.bytes_per_s = None
    wait_until(lambda: report_of(client)["is_live"])
    run_one_by_one(client, tasks_of(expected), lambda: None)
    wait_until(lambda: not report_of(client)["waiting_bytes"])
    client.flush_cache()
    # On a busy machine a link may be lost only because it gets no CPU time.
    wait_until(lambda: report_of(client)["is_live"])
    proxy.bytes_per_s = SLOW_BYTES_PER_S
    return client


def wait_until(holds: Callable[[], Any]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, "what was waited for does not happen"
        time.sleep(0.01)


def report_of(client: GenerateClient) -> dict[str, Any]:
    return dict(client.kvspec_report()["prefix_tiers"]["remote"])


class Counted:
    """Counters of a server since the object was made."""

    def __init__(self, client: GenerateClient) -> None:
        self._client = client
        self._before = self._now()

    def __getitem__(self, name: str) -> int:
        return self._now()[name] - self._before[name]

    def _now(self) -> dict[str, int]:
        return dict(report_of(self._client)["counters"])


def metric(client: GenerateClient, name: str, label: str) -> float:
    text = requests.get(f"{client.base_url}/metrics", timeout=60).text
    start = f"sglang:kvspec_prefix_server_{name}_total{{"
    lines = [line for line in text.splitlines() if line.startswith(start) and label in line]
    return sum(float(line.split()[-1]) for line in lines)


def test_requests_draft_while_residuals_are_on_their_way(
    client: GenerateClient, expected: Pairs, announce: Announce
) -> None:
    counted = Counted(client)
    answers = run_one_by_one(client, tasks_of(expected), lambda: None)
    hits = check(answers, expected)
    assert hits["remote"] == sum(full_tokens(task) for task in tasks_of(expected))
    drafts = [output.meta["kvspec"]["drafts_on_anchors"] for _, output in answers]
    announce(f"drafts on anchors: {drafts}")
    assert all(drafts)
    assert all("prefill_finished_time" in output.meta for _, output in answers)
    assert counted["drafts_on_anchors"] == sum(drafts)
    assert (counted["early"], counted["returned"]) == (NUM_TASKS, 0)
    # The pages that arrived are in the KV cache.
    hits_then = check(run_one_by_one(client, tasks_of(expected), lambda: None), expected)
    assert hits_then["resident"] == hits["remote"]
    assert metric(client, "drafts", 'read="anchors"') == sum(drafts)
    assert metric(client, "lookups", 'outcome="early"') == NUM_TASKS


def test_all_at_once(client: GenerateClient, expected: Pairs) -> None:
    counted = Counted(client)
    hits = ask_all_at_once(client, expected)
    assert counted["early"] > 1
    assert counted["returned"] == 0
    assert hits["remote"] + hits["resident"] == sum(full_tokens(task) for task, _ in expected)


def test_one_of_several_requests_with_one_prefix_starts_early(
    client: GenerateClient, expected: Pairs
) -> None:
    counted = Counted(client)
    hits = ask_all_at_once(client, expected[:1] * 3)
    assert counted["early"] == 1
    each = full_tokens(expected[0][0])
    assert (hits["remote"], hits["resident"]) == (each, 2 * each)


def test_a_seed_gives_what_it_gives_without_a_prefix_server(
    client: GenerateClient, expected: Pairs
) -> None:
    params = {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 32, "ignore_eos": True}
    body = {"input_ids": list(expected[0][0].input_ids), "sampling_params": params}
    counted = Counted(client)
    early, cached = (
        client._send(body, stream=False).json()["output_ids"] for _ in ("early", "cached")
    )
    assert counted["early"] == 1
    assert early == cached


@pytest.mark.parametrize("fault", ["kill", "stall", "cut"])
def test_residuals_that_do_not_come_cost_no_answer(
    client: GenerateClient,
    store: PrefixServerProcess,
    proxy: Proxy,
    expected: Pairs,
    fault: str,
) -> None:
    counted = Counted(client)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all_at_once, client, expected)
        wait_until(lambda: counted["early"])
        if fault == "kill":
            store.kill()
        elif fault == "stall":
            proxy.flows.clear()
        proxy.cut()
        try:
            asked.result()
        finally:
            proxy.flows.set()
            if fault == "kill":
                store.start()
    assert counted["returned"] > 0
    assert report_of(client)["landed_pages"] == 0
    wait_until(lambda: report_of(client)["is_live"])


def test_a_request_that_is_aborted_leaves_nothing(client: GenerateClient, expected: Pairs) -> None:
    counted = Counted(client)
    for num_before, task in enumerate(tasks_of(expected)[:3]):
        rid = uuid.uuid4().hex
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client._post, task.input_ids, 32, stream=False, rid=rid)
            wait_until(lambda seen=num_before: counted["early"] > seen)
            client._abort(rid)
            answer = asked.result().json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until(lambda: not report_of(client)["landed_pages"])
    client.flush_cache()
    check(run_one_by_one(client, tasks_of(expected), lambda: None), expected)


def test_damaged_residuals_are_computed_again(
    client: GenerateClient, folder: Path, expected: Pairs
) -> None:
    # The files of all ranks, and of earlier servers of this module.
    for records in folder.rglob("residuals.data"):
        content = bytearray(records.read_bytes())
        # The interval damages two or more pages of each prompt, but not always the first.
        for place in range(0, len(content), DAMAGED_EVERY):
            content[place] ^= 1
        records.write_bytes(content)
    counted = Counted(client)
    check(run_one_by_one(client, tasks_of(expected), lambda: None), expected)
    assert 0 < counted["returned"] == counted["early"]
