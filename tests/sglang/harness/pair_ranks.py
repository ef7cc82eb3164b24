"""Checks of a prefill and a decode server, of which one or both have several ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import requests
from harness.client import Output
from harness.faults import fault_environment
from harness.models import DEMO_MODEL
from harness.pair import Pair, PairSpec, running_pair, wait_until
from harness.pair_faults import assert_nothing_left, residuals_on_their_way
from harness.references import PlainReference, Workload
from harness.scenarios import STRICT_CHECKS, retract_every
from harness.servers import Announce
from harness.soak import Soak
from harness.suite import Task, run_one_by_one

from kvspec_testkit.servers.transfer_report import read_transfer_report

RANKS_WORKLOAD = Workload(DEMO_MODEL, (127, 1025, 64, 700), max_new_tokens=32)
SLOW_RANK = "slow_rank"


def with_faults(spec: PairSpec, fault_file: Path, **settings: object) -> PairSpec:
    checks = STRICT_CHECKS.environment + retract_every(2)
    faults = fault_environment(KVSPEC_FAULT_FILE=fault_file, **settings)
    return replace(spec, environment=dict(checks + faults))


def ask_all_at_once(pair: Pair, reference: PlainReference) -> list[tuple[Task, Output]]:
    """Send all prompts at once. Raises AssertionError for an answer that differs from plain
    SGLang's."""
    tasks, client = reference.suite.prompts, pair.client
    with ThreadPoolExecutor(len(tasks)) as pool:
        outputs = pool.map(lambda t: client.generate(t.input_ids, t.max_new_tokens), tasks)
        answers = list(zip(tasks, outputs, strict=True))
    reference.check(answers)
    return answers


def answer_like_one(pair: Pair, reference: PlainReference) -> None:
    """Check answers alone and together, with drafts before residuals and with retractions."""
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
    assert client.kvspec_report()["transfer"]["drafts_on_anchors"] > 0


def abort_all(pair: Pair, reference: PlainReference) -> None:
    """Abort all requests while their residuals are on the link."""
    client, tasks = pair.client, reference.suite.prompts
    with ThreadPoolExecutor(len(tasks)) as pool:
        cut = [pool.submit(client.generate, t.input_ids, t.max_new_tokens) for t in tasks]
        wait_until(lambda: residuals_on_their_way(client), "residuals are on their way")
        requests.post(
            f"{client.base_url}/abort_request", json={"abort_all": True}, timeout=30
        ).raise_for_status()
    # An aborted request has either failed, or has the right tokens so far.
    outputs = [(t, c.result()) for t, c in zip(tasks, cut, strict=True) if c.exception() is None]
    lengths = [len(output.output_ids) for _, output in outputs]
    assert len(outputs) < len(tasks) or min(lengths) < RANKS_WORKLOAD.max_new_tokens
    for task, output in outputs:
        assert output.output_ids == reference.answer(task)[: len(output.output_ids)]
    assert_nothing_left(client)
    ask_all_at_once(pair, reference)


def come_and_go(
    spec: PairSpec,
    answers: list[tuple[Task, list[int]]],
    reference: PlainReference,
    folder: Path,
    announce: Announce,
) -> None:
    """Run a soak in which requests are aborted, hung up or retracted, wherever their KV is."""
    with running_pair(spec, folder, announce) as pair:
        ask_all_at_once(pair, reference)
        soak = Soak(pair.client, answers, concurrent=8, seed=3)
        soak.random_round(24)
        announce(f"ranks of two servers: {soak.result}")
        assert not soak.result.mismatches, "\n".join(soak.result.mismatches)
        assert not soak.result.leaks, "\n".join(soak.result.leaks)
        assert soak.result.cut_short > 0
        assert_nothing_left(pair.client)
