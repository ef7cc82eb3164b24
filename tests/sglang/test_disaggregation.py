"""A prefill and a decode server answer together what plain SGLang does alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness.client import Output
from harness.comparison import compare
from harness.models import DEMO_MODEL
from harness.pair import Pair, PairClient, PairSpec, running_pair, wait_until
from harness.references import PlainReference, Workload
from harness.scenarios import FORCED_RETRACTION, PREFIX_HITS, STRICT_CHECKS
from harness.servers import Announce, ServerSwitch
from harness.soak import Soak
from harness.suite import Suite, Task, run_one_by_one

pytestmark = pytest.mark.server

POOL = "--max-total-tokens=24576"
# About a second for the residuals of 1000 tokens: drafts must be made on anchors alone.
SLOW_LINK = "--kvspec-link-gbps=0.006"
LENGTHS = (64, 127, 1500, 300, 192, 1025, 65, 700)
WORKLOAD = Workload(DEMO_MODEL, LENGTHS, max_new_tokens=48)


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, servers: ServerSwitch, announce: Announce
) -> PlainReference:
    cache = request.config.getoption("--reference-cache")
    return PlainReference(servers, WORKLOAD, (PREFIX_HITS,), announce, cache)


@pytest.fixture(scope="module")
def pair(
    reference: PlainReference,
    servers: ServerSwitch,
    tmp_path_factory: pytest.TempPathFactory,
    announce: Announce,
) -> Iterator[Pair]:
    """Two servers that check their memory at every step; one retracts now and then."""
    servers.release()
    spec = PairSpec(
        DEMO_MODEL,
        (POOL, "--chunked-prefill-size=512"),
        prefill=(SLOW_LINK,),
        environment=dict(STRICT_CHECKS.environment + FORCED_RETRACTION.environment),
    )
    with running_pair(spec, tmp_path_factory.mktemp("pair"), announce) as running:
        yield running


@pytest.fixture
def client(pair: Pair) -> PairClient:
    return pair.client


def check(answers: list[tuple[Task, Output]], reference: PlainReference) -> None:
    expected = [reference.answer(task) for task, _ in answers]
    mismatches = compare(answers, expected)
    assert not mismatches, "\n".join(map(str, mismatches))


def transfer_of(output: Output) -> dict[str, Any]:
    return dict(output.meta["kvspec"]["transfer"])


def test_one_at_a_time(client: PairClient, reference: PlainReference) -> None:
    answers = run_one_by_one(client, reference.suite.prompts, lambda: None)
    check(answers, reference)
    longest = max(answers, key=lambda answer: len(answer[0].input_ids))[1]
    transfer = transfer_of(longest)
    seconds = transfer["seconds"]
    assert transfer["mode"] == "split"
    assert 0 < seconds["anchors"] < seconds["residuals"] <= seconds["first_verification"]
    # It drafted all it may while residuals were on their way.
    assert len(transfer["drafts_s"]) == 32
    assert transfer["drafts_s"][-1] < seconds["residuals"]
    assert len(longest.meta["kvspec_token_s"]) == len(longest.output_ids)


def test_prefix_hits_on_the_prefill_side(client: PairClient, reference: PlainReference) -> None:
    tasks = [
        task for family in reference.suite.families for task in (family.leader, family.follower)
    ]
    answers = run_one_by_one(client, tasks, lambda: None)
    check(answers, reference)
    assert sum(output.cached_len for _, output in answers) > 0


def test_all_at_once(client: PairClient, reference: PlainReference) -> None:
    tasks = reference.suite.prompts
    with ThreadPoolExecutor(len(tasks)) as pool:
        outputs = pool.map(lambda t: client.generate(t.input_ids, t.max_new_tokens), tasks)
        answers = list(zip(tasks, outputs, strict=True))
    check(answers, reference)
    assert sum(output.num_retractions for _, output in answers) > 0


def test_requests_that_come_and_go(
    client: PairClient, reference: PlainReference, announce: Announce
) -> None:
    """Some are aborted and some hang up, wherever their KV is; nothing stays behind on either
    side."""
    suite: Suite = reference.suite
    answers = [(task, reference.answer(task)) for task in suite.prompts]
    soak = Soak(client, answers, concurrent=8, seed=3)
    soak.random_round(24)
    announce(f"two servers: {soak.result}")
    assert not soak.result.mismatches, "\n".join(soak.result.mismatches)
    assert not soak.result.leaks, "\n".join(soak.result.leaks)
    assert soak.result.cut_short > 0
    client.flush_cache()
    wait_until(lambda: allocated_pages(client) == 0, "pages of the prefill server are free")


def allocated_pages(client: PairClient) -> int:
    return int(client.prefill.kvspec_report()["pools"]["num_pages_allocated"])
