"""Answers stay plain SGLang's where few pages have anchors, and requests compete for these."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.arrival import run_staggered
from harness.comparison import compare
from harness.faults import fault_environment
from harness.models import DEMO_MODEL
from harness.progress import Progress
from harness.references import PlainReference, Setting, Workload
from harness.scenarios import FORCED_RETRACTION, STRICT_CHECKS, STRICT_FAMILIES
from harness.servers import Announce, ServerSwitch

pytestmark = pytest.mark.server

# Together about twice the pool, whose pages have anchors for a tenth.
WORKLOAD = Workload(DEMO_MODEL, (127, 1500, 300, 2600, 192, 350, 1025), max_new_tokens=80)
ARGUMENTS = (
    "--max-total-tokens=4096",
    "--chunked-prefill-size=512",
    "--kvspec-compressor=snapkv:keep_anchors=false",
    "--kvspec-draft-budget=0.1",
)
ANCHOR_PAGES = 8


@pytest.mark.parametrize(
    "schedule",
    [
        "ahead",
        pytest.param("rounds", marks=pytest.mark.identity),
        pytest.param("staggered", marks=pytest.mark.identity),
    ],
)
def test_plain_answers_where_anchors_run_out(
    servers: ServerSwitch, announce: Announce, schedule: str
) -> None:
    """Send families of prompts, all at once, with retractions, twice."""
    reference = PlainReference(servers, WORKLOAD, (STRICT_FAMILIES,), announce)
    is_ahead = schedule == "ahead"
    setting = Setting("exact", "uniform4", "rounds" if is_ahead else schedule, "auto")
    spec = STRICT_CHECKS.server(FORCED_RETRACTION.server(setting.server(DEMO_MODEL, *ARGUMENTS)))
    seed = {"KVSPEC_AHEAD_SEED": 5} if is_ahead else {}
    faults = fault_environment(KVSPEC_ANCHOR_PAGES=ANCHOR_PAGES, **seed)
    client = servers.use(replace(spec, environment=(*spec.environment, *faults)))
    progress = Progress(f"few anchors, {schedule}", announce)
    for _ in range(2):
        tasks = [task for each in reference.suite.families for task in (each.leader, each.follower)]
        answers = run_staggered(client, tasks, progress.done)
        mismatches = compare(answers, reference.expected(STRICT_FAMILIES, answers))
        assert not mismatches, mismatches
    report = client.kvspec_report()
    freed = report["freed_anchors"]
    assert report["pools"]["anchor_pages"] == ANCHOR_PAGES
    assert min(freed["freed"], freed["idle"], freed["without"]) > 0
    assert report["counters"]["accepted"] > 0
    client.flush_cache()
    assert client.kvspec_report()["freed_anchors"]["pages_with_anchors"] == 0
