"""Forty prompts through a prefill and a decode server, with all arrivals and with a slow link. The
run takes minutes, which CI does not have."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from harness.client import Output
from harness.comparison import Mismatch, compare
from harness.identity_report import IdentityReport, ScenarioResult
from harness.models import DEMO_MODEL
from harness.pair import Pair, PairClient, PairSpec, running_pair
from harness.progress import Progress
from harness.references import PlainReference, Workload
from harness.scenarios import ALONE, PREFIX_HITS, STAGGERED, Scenario
from harness.servers import Announce, ServerSwitch
from harness.soak import Soak
from harness.suite import Answers, Suite, Task

from sglang_kvspec.core.config import MOST_AUTO_DRAFTS

pytestmark = [pytest.mark.server, pytest.mark.identity]

POOL = "--max-total-tokens=65536"
NEW_TOKENS = 128
# From 1K to the longest prompt that the model takes with its answer and drafts.
LENGTHS = tuple(sorted({round(1024 * (8000 / 1024) ** (i / 39)) for i in range(40)}))
WORKLOAD = Workload(DEMO_MODEL, LENGTHS, NEW_TOKENS)
# At 100 MB/s the residuals of 2K tokens would arrive while 32 tokens are drafted.
SLOW_GBPS = 0.001
SLOW_WORKLOAD = Workload(DEMO_MODEL, tuple(range(1024, 2049, 146)), NEW_TOKENS)
SETTING = "split-uniform4"
FAMILIES = True
PAIR = PairSpec(DEMO_MODEL, (POOL,))


def report(
    into: IdentityReport,
    scenario: str,
    answers: Answers,
    mismatches: list[Mismatch],
    elapsed_s: float,
) -> None:
    into.add(
        ScenarioResult(
            model=DEMO_MODEL.name,
            setting=SETTING,
            scenario=scenario,
            baseline="plain SGLang, one server, one request at a time",
            num_prompts=len({task.input_ids for task, _ in answers}),
            num_answers=len(answers),
            num_retractions=sum(output.num_retractions for _, output in answers),
            mismatches=tuple(mismatches),
            elapsed_s=elapsed_s,
        )
    )


def run(
    client: PairClient,
    scenario: Scenario,
    name: str,
    suite: Suite,
    reference: PlainReference,
    identity_report: IdentityReport,
    announce: Announce,
) -> Answers:
    progress = Progress(name, announce)
    answers = scenario.run(client, suite, progress.done)
    mismatches = compare(answers, reference.expected(scenario, answers))
    report(identity_report, name, answers, mismatches, progress.elapsed_s)
    announce(f"{name}: {len(mismatches)} of {len(answers)} answers differ")
    assert not mismatches, "\n".join(map(str, mismatches))
    return answers


@pytest.mark.parametrize("scenario", [ALONE, STAGGERED, PREFIX_HITS], ids=lambda s: s.name)
def test_forty_prompts(
    pair: Pair,
    scenario: Scenario,
    reference: PlainReference,
    identity_report: IdentityReport,
    announce: Announce,
) -> None:
    suite = reference.suite
    answers = run(pair.client, scenario, scenario.name, suite, reference, identity_report, announce)
    if scenario is PREFIX_HITS:
        assert sum(output.cached_len for _, output in answers) > 0


def test_some_are_aborted(pair: Pair, reference: PlainReference, announce: Announce) -> None:
    tasks = [(task, reference.answer(task)) for task in reference.suite.prompts]
    soak = Soak(pair.client, tasks, concurrent=8, seed=5)
    for _ in range(2):
        soak.random_round(48)
    announce(f"aborts: {soak.result}")
    assert not soak.result.mismatches, "\n".join(soak.result.mismatches)
    assert not soak.result.leaks, "\n".join(soak.result.leaks)
    assert soak.result.cut_short > 0


def test_a_link_of_a_hundredth_of_the_speed(
    servers: ServerSwitch,
    tmp_path_factory: pytest.TempPathFactory,
    identity_report: IdentityReport,
    announce: Announce,
) -> None:
    """Send all prompts at once, so that their residuals also wait for each other."""
    reference = PlainReference(servers, SLOW_WORKLOAD, (), announce)
    progress = Progress("slow link", announce)
    servers.release()
    spec = replace(PAIR, prefill=(f"--kvspec-link-gbps={SLOW_GBPS}",))
    with running_pair(spec, tmp_path_factory.mktemp("pair"), announce) as slow:
        answers = run_at_once(slow.client, reference.suite.prompts, progress)
        mismatches = compare(answers, [reference.answer(task) for task, _ in answers])
        report(identity_report, "slow link", answers, mismatches, progress.elapsed_s)
        assert not mismatches, "\n".join(map(str, mismatches))
        for _, output in answers:
            transfer = output.meta["kvspec"]["transfer"]
            assert transfer["seconds"]["residuals"] > transfer["drafts_s"][-1]
            assert len(transfer["drafts_s"]) == MOST_AUTO_DRAFTS


def run_at_once(client: PairClient, tasks: Sequence[Task], progress: Progress) -> Answers:
    def send(task: Task) -> tuple[Task, Output]:
        output = client.generate(task.input_ids, task.max_new_tokens)
        progress.done()
        return task, output

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(send, tasks))
