"""A prefill and a decode server of two ranks each answer together what plain SGLang does alone.

The second rank's link is half as fast as the first's, so that on the decode server KV has always
arrived on one rank alone for a while; and what goes wrong there goes wrong on both.
"""

from __future__ import annotations

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
from harness.pair_faults import Round, assert_nothing_left, residuals_on_their_way
from harness.references import PlainReference, Workload
from harness.scenarios import FORCED_RETRACTION, STRICT_CHECKS
from harness.servers import Announce, ServerSwitch
from harness.soak import Soak
from harness.suite import Task, run_one_by_one

from sglang_kvspec.testing.transfer_report import read_transfer_report

# Two servers of two ranks take two minutes to start on two cores.
pytestmark = [pytest.mark.server, pytest.mark.identity]

# About a second for the residuals of 1000 tokens, on the first rank's link.
FLAGS = ("--max-total-tokens=24576", "--chunked-prefill-size=512", "--tp-size=2")
SLOW_LINK = "--kvspec-link-gbps=0.006"
SPEC = PairSpec(DEMO_MODEL, FLAGS, prefill=(SLOW_LINK,))
WORKLOAD = Workload(DEMO_MODEL, (127, 1025, 64, 700), max_new_tokens=32)
FAMILIES = False
SLOW_RANK = "slow_rank"


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_file_in(tmp_path_factory.mktemp("faults"), SLOW_RANK)


def with_faults(spec: PairSpec, fault_file: Path, **settings: object) -> PairSpec:
    checks = STRICT_CHECKS.environment + FORCED_RETRACTION.environment
    faults = fault_environment(KVSPEC_FAULT_FILE=fault_file, **settings)
    return replace(spec, environment=dict(checks + faults))


@pytest.fixture(scope="module")
def pair(
    reference: PlainReference,
    servers: ServerSwitch,
    fault_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    announce: Announce,
) -> Iterator[Pair]:
    servers.release()
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(with_faults(SPEC, fault_file), folder, announce) as running:
        yield running


def ask_all_at_once(pair: Pair, reference: PlainReference) -> list[tuple[Task, Output]]:
    """Raises AssertionError for an answer that is not plain SGLang's."""
    tasks, client = reference.suite.prompts, pair.client
    with ThreadPoolExecutor(len(tasks)) as pool:
        outputs = pool.map(lambda t: client.generate(t.input_ids, t.max_new_tokens), tasks)
        answers = list(zip(tasks, outputs, strict=True))
    reference.check(answers)
    return answers


def test_two_ranks_answer_like_one(pair: Pair, reference: PlainReference) -> None:
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
    report_of_first = client.kvspec_report()
    assert report_of_first["ranks"] == client.prefill.kvspec_report()["ranks"] == 2
    assert report_of_first["transfer"]["drafts_on_anchors"] > 0


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


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("lost_residuals", "another rank of this server could not receive its part"),
        ("lost_anchors", "another rank of this server gave it up"),
        # Of which server decides who hears of it first.
        ("lost_departure", "another rank of"),
    ],
)
def test_what_one_rank_loses_all_give_up(
    pair: Pair, reference: PlainReference, fault_file: Path, fault: str, reason: str
) -> None:
    """One request; the others are answered right."""
    fault_file.with_suffix(".fired").unlink(missing_ok=True)
    fault_file.write_text(f"{SLOW_RANK} {fault}")
    try:
        errors = Round(pair.client, reference.suite.prompts).finish(reference)
    finally:
        fault_file.write_text(SLOW_RANK)
    (error,) = errors
    assert reason in error
    assert_nothing_left(pair.client)
    ask_all_at_once(pair, reference)


def test_a_decode_server_of_another_size_in_its_place(
    pair: Pair, reference: PlainReference
) -> None:
    """More of such: test_disaggregation_sizes.py."""
    pair.restart_decode("--tp-size=1")
    ask_all_at_once(pair, reference)
    pair.restart_decode()
    ask_all_at_once(pair, reference)


ROUNDS = replace(SPEC, decode=("--kvspec-schedule=rounds",))
IN_ONE_PIECE = replace(SPEC, arguments=(*FLAGS, "--kvspec-transfer=full"))


# Where the cache of residuals holds a part of them, who verifies is planned by what is in it.
@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (SPEC, {"KVSPEC_CACHE_PAGES": 20}),
        (ROUNDS, {}),
        (ROUNDS, {"KVSPEC_CACHE_PAGES": 20}),
        (IN_ONE_PIECE, {}),
    ],
    ids=["staggered-cache", "rounds", "rounds-cache", "in-one-piece"],
)
def test_requests_that_come_and_go(
    spec: PairSpec,
    settings: dict[str, object],
    reference: PlainReference,
    servers: ServerSwitch,
    fault_file: Path,
    tmp_path: Path,
    announce: Announce,
) -> None:
    """Some are aborted, some hang up and some are retracted, wherever their KV is."""
    answers = [(task, reference.answer(task)) for task in reference.suite.prompts]
    servers.release()
    with running_pair(with_faults(spec, fault_file, **settings), tmp_path, announce) as pair:
        ask_all_at_once(pair, reference)
        soak = Soak(pair.client, answers, concurrent=8, seed=3)
        soak.random_round(24)
        announce(f"two servers of two ranks: {soak.result}")
        assert not soak.result.mismatches, "\n".join(soak.result.mismatches)
        assert not soak.result.leaks, "\n".join(soak.result.leaks)
        assert soak.result.cut_short > 0
        assert_nothing_left(pair.client)
