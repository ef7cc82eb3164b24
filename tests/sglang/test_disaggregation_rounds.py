"""A decode server that works in rounds, as a GPU does, while KV arrives late. One crowd of requests
for each kind of rounds; CI has one such server, in test_disaggregation.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from harness.client import Output
from harness.comparison import compare
from harness.faults import fault_environment
from harness.models import DEMO_MODEL
from harness.pair import Pair, PairSpec, running_pair
from harness.pair_faults import assert_nothing_left
from harness.references import PlainReference, Workload
from harness.scenarios import FORCED_RETRACTION, STRICT_CHECKS
from harness.servers import Announce, ServerSwitch
from harness.soak import Soak
from harness.suite import Task

from kvspec_testkit.servers.transfer_report import TransferReport, read_transfer_report

pytestmark = [pytest.mark.server, pytest.mark.identity]

POOL = "--max-total-tokens=24576"
# About a second for the residuals of 1000 tokens.
SLOW_LINK = "--kvspec-link-gbps=0.006"
ROUNDS = "--kvspec-schedule=rounds"
WORKLOAD = Workload(DEMO_MODEL, (127, 1025, 65, 300, 700, 190), max_new_tokens=48)
FAMILIES = False
RETRACTING = PairSpec(
    DEMO_MODEL,
    (POOL, "--chunked-prefill-size=512"),
    prefill=(SLOW_LINK,),
    decode=(ROUNDS,),
    environment=dict(STRICT_CHECKS.environment + FORCED_RETRACTION.environment),
)
# Residuals go into a store of which the cache holds a part, and rounds are planned by that part.
SMALL_CACHE = replace(
    RETRACTING,
    environment={**RETRACTING.environment, **dict(fault_environment(KVSPEC_CACHE_PAGES=20))},
)
# Pre-launched rounds, and tokens without drafts: see faults/kvspec_ahead.py.
AHEAD = replace(
    RETRACTING,
    decode=(ROUNDS, "--kvspec-host-gb=0"),
    environment={**RETRACTING.environment, **dict(fault_environment(KVSPEC_AHEAD_SEED=7))},
)
NGRAM = replace(RETRACTING, decode=(ROUNDS, "--kvspec-drafter=ngram"))
# KV that arrives in one piece is drafted on and verified as KV that was computed here.
IN_ONE_PIECE = replace(RETRACTING, arguments=(*RETRACTING.arguments, "--kvspec-transfer=full"))


def ask_all_at_once(pair: Pair, reference: PlainReference) -> list[TransferReport]:
    """Send all prompts at once. Raises AssertionError for an answer that differs from plain
    SGLang's."""
    tasks, client = reference.suite.prompts, pair.client

    def send(task: Task) -> Output:
        return client.generate(task.input_ids, task.max_new_tokens)

    with ThreadPoolExecutor(len(tasks)) as pool:
        outputs = list(pool.map(send, tasks))
    answers = list(zip(tasks, outputs, strict=True))
    mismatches = compare(answers, [reference.answer(task) for task in tasks])
    assert not mismatches, "\n".join(map(str, mismatches))
    assert_nothing_left(client)
    # A retracted request has lost the times of its transfer.
    kept = [output for output in outputs if not output.num_retractions]
    reports = [read_transfer_report(output.meta) for output in kept]
    for report, output in zip(reports, kept, strict=True):
        assert len(report.token_s) == len(output.output_ids)
    return reports


@pytest.mark.parametrize(
    "spec", [RETRACTING, SMALL_CACHE, AHEAD, NGRAM], ids=["all", "cache", "ahead", "ngram"]
)
def test_requests_that_come_and_go(
    spec: PairSpec,
    reference: PlainReference,
    servers: ServerSwitch,
    tmp_path_factory: pytest.TempPathFactory,
    announce: Announce,
) -> None:
    """Abort, hang up and retract requests, wherever their KV is."""
    answers = [(task, reference.answer(task)) for task in reference.suite.prompts]
    servers.release()
    with running_pair(spec, tmp_path_factory.mktemp("pair"), announce) as pair:
        reports = ask_all_at_once(pair, reference)
        seconds = [report.transfer.seconds for report in reports]
        assert all(s.residuals <= s.first_verification for s in seconds)
        assert max(report.transfer.drafts_before_residuals for report in reports) > 0
        soak = Soak(pair.client, answers, concurrent=8, seed=3)
        for _ in range(2):
            soak.random_round(24)
        announce(f"two servers: {soak.result}")
        announce(f"{pair.client.kvspec_report().get('ahead')}")
        assert not soak.result.mismatches, "\n".join(soak.result.mismatches)
        assert not soak.result.leaks, "\n".join(soak.result.leaks)
        assert soak.result.cut_short > 0
        assert_nothing_left(pair.client)


def test_kv_in_one_piece(
    reference: PlainReference,
    servers: ServerSwitch,
    tmp_path_factory: pytest.TempPathFactory,
    announce: Announce,
) -> None:
    servers.release()
    with running_pair(IN_ONE_PIECE, tmp_path_factory.mktemp("pair"), announce) as pair:
        reports = ask_all_at_once(pair, reference)
        assert all(report.transfer.mode == "full" for report in reports)
        assert all(report.transfer.seconds.residuals is None for report in reports)
        assert all(report.transfer.bytes.residuals == 0 for report in reports)
        assert sum(len(report.transfer.drafts_s) for report in reports) > 0
