"""A prefill server of two ranks and a decode server of one, or the other way round, answer together
what plain SGLang does.

The second rank of a prefill server has a link half as fast as the first's, so that of every page
half of the KV heads have always arrived alone for a while.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from harness.client import Output
from harness.faults import fault_environment, fault_file_in
from harness.models import DEMO_MODEL
from harness.pair import Pair, PairSpec, running_pair, wait_until
from harness.pair_faults import (
    Round,
    assert_nothing_left,
    register,
    registered,
    residuals_on_their_way,
)
from harness.references import PlainReference, Workload
from harness.scenarios import FORCED_RETRACTION, STRICT_CHECKS
from harness.servers import Announce, ServerSwitch
from harness.soak import Soak
from harness.suite import Task, run_one_by_one

from sglang_kvspec.testing.transfer_report import read_transfer_report
from sglang_kvspec.transport.testing.proxy import Proxy

# Servers of three ranks take more than a minute to start on two cores.
pytestmark = [pytest.mark.server, pytest.mark.identity]

FLAGS = ("--max-total-tokens=24576", "--chunked-prefill-size=512")
TWO_RANKS = "--tp-size=2"
# A second or two for the residuals of 1000 tokens, on the first rank's link.
JOINED = PairSpec(DEMO_MODEL, FLAGS, prefill=(TWO_RANKS, "--kvspec-link-gbps=0.006"))
FORKED = PairSpec(DEMO_MODEL, FLAGS, prefill=("--kvspec-link-gbps=0.003",), decode=(TWO_RANKS,))
WORKLOAD = Workload(DEMO_MODEL, (127, 1025, 64, 700), max_new_tokens=32)
FAMILIES = False
SLOW_RANK = "slow_rank"


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_file_in(tmp_path_factory.mktemp("faults"), SLOW_RANK)


def with_faults(spec: PairSpec, fault_file: Path) -> PairSpec:
    checks = STRICT_CHECKS.environment + FORCED_RETRACTION.environment
    return replace(spec, environment=dict(checks + fault_environment(KVSPEC_FAULT_FILE=fault_file)))


@pytest.fixture(scope="module", params=[JOINED, FORKED], ids=["joined", "forked"])
def pair(
    request: pytest.FixtureRequest,
    reference: PlainReference,
    servers: ServerSwitch,
    fault_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    announce: Announce,
) -> Iterator[Pair]:
    servers.release()
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(with_faults(request.param, fault_file), folder, announce) as running:
        yield running


def ask_all_at_once(pair: Pair, reference: PlainReference) -> list[tuple[Task, Output]]:
    """Raises AssertionError for an answer that is not plain SGLang's."""
    tasks, client = reference.suite.prompts, pair.client
    with ThreadPoolExecutor(len(tasks)) as pool:
        outputs = pool.map(lambda t: client.generate(t.input_ids, t.max_new_tokens), tasks)
        answers = list(zip(tasks, outputs, strict=True))
    reference.check(answers)
    return answers


def test_servers_of_two_sizes_answer_like_one(pair: Pair, reference: PlainReference) -> None:
    client = pair.client
    alone = run_one_by_one(client, reference.suite.prompts[:2], lambda: None)
    reference.check(alone)
    report = read_transfer_report(alone[1][1].meta)
    seconds = report.transfer.seconds
    assert 0 < seconds.anchors < seconds.residuals <= seconds.first_verification
    assert report.transfer.drafts_before_residuals > 0
    together = ask_all_at_once(pair, reference)
    assert sum(output.num_retractions for _, output in together) > 0
    assert_nothing_left(client)
    report_of_decode = client.kvspec_report()
    assert report_of_decode["ranks"] + client.prefill.kvspec_report()["ranks"] == 3
    assert report_of_decode["transfer"]["drafts_on_anchors"] > 0


def test_an_abort_while_residuals_are_on_their_way(pair: Pair, reference: PlainReference) -> None:
    client, tasks = pair.client, reference.suite.prompts
    with ThreadPoolExecutor(len(tasks)) as pool:
        cut = [pool.submit(client.generate, t.input_ids, t.max_new_tokens) for t in tasks]
        wait_until(lambda: residuals_on_their_way(client), "residuals are on their way")
        requests.post(
            f"{client.base_url}/abort_request", json={"abort_all": True}, timeout=30
        ).raise_for_status()
    # One that is cut short has either failed, or an answer that is right as far as it goes.
    outputs = [(t, c.result()) for t, c in zip(tasks, cut, strict=True) if c.exception() is None]
    lengths = [len(output.output_ids) for _, output in outputs]
    assert len(outputs) < len(tasks) or min(lengths) < WORKLOAD.max_new_tokens
    for task, output in outputs:
        assert output.output_ids == reference.answer(task)[: len(output.output_ids)]
    assert_nothing_left(client)
    ask_all_at_once(pair, reference)


@pytest.mark.parametrize("fault", ["lost_departure", "lost_residuals"])
def test_what_one_rank_gives_up_fails_as_a_whole(
    pair: Pair, reference: PlainReference, fault_file: Path, fault: str
) -> None:
    """On the server that has two. One request, of those whose residuals take a while; the others
    are answered right."""
    is_prefills = fault == "lost_departure"
    if (pair.client.kvspec_report()["ranks"] == 1) is not is_prefills:
        pytest.skip("that server has one rank")
    tasks = [task for task in reference.suite.prompts if len(task.input_ids) > 500]
    fault_file.with_suffix(".fired").unlink(missing_ok=True)
    fault_file.write_text(f"{SLOW_RANK} {fault}")
    try:
        errors = Round(pair.client, tasks).finish(reference)
    finally:
        fault_file.write_text(SLOW_RANK)
    (error,) = errors
    assert "on purpose" in error or "another rank of" in error
    assert_nothing_left(pair.client)
    ask_all_at_once(pair, reference)


def test_links_to_one_rank_that_are_cut(pair: Pair, reference: PlainReference) -> None:
    """The last one, by another name of this machine: the decode server has other links to that."""
    rank = pair.client.prefill.kvspec_report()["ranks"] - 1
    direct = registered(pair, rank)
    proxy = Proxy(direct)
    register(pair, proxy.address, rank)
    try:
        client = pair.client_by("localhost")
        round_ = Round(client, reference.suite.prompts)
        wait_until(lambda: residuals_on_their_way(client), "residuals are on their way")
        for _ in range(3):
            proxy.cut()
            time.sleep(0.3)
        assert round_.finish(reference) == []
        assert proxy.num_connections > 3
    finally:
        register(pair, direct, rank)
        proxy.close()
    assert_nothing_left(pair.client)


IN_ROUNDS = ("--kvspec-schedule=rounds",)
IN_ONE_PIECE = (*FLAGS, "--kvspec-transfer=full")
SPECS = {
    "joined": JOINED,
    "joined-rounds": replace(JOINED, decode=IN_ROUNDS),
    "joined-full": replace(JOINED, arguments=IN_ONE_PIECE),
    "forked": FORKED,
    "forked-rounds": replace(FORKED, decode=(TWO_RANKS, *IN_ROUNDS)),
    "forked-full": replace(FORKED, arguments=IN_ONE_PIECE),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_requests_that_come_and_go(
    spec: PairSpec,
    reference: PlainReference,
    servers: ServerSwitch,
    fault_file: Path,
    tmp_path: Path,
    announce: Announce,
) -> None:
    """Some are aborted, some hang up and some are retracted, wherever their KV is."""
    answers = [(task, reference.answer(task)) for task in reference.suite.prompts]
    servers.release()
    with running_pair(with_faults(spec, fault_file), tmp_path, announce) as pair:
        ask_all_at_once(pair, reference)
        soak = Soak(pair.client, answers, concurrent=8, seed=3)
        soak.random_round(24)
        announce(f"two sizes: {soak.result}")
        assert not soak.result.mismatches, "\n".join(soak.result.mismatches)
        assert not soak.result.leaks, "\n".join(soak.result.leaks)
        assert soak.result.cut_short > 0
        assert_nothing_left(pair.client)
