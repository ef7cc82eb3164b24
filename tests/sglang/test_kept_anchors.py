"""Residuals of a fifth of what the prefix cache is to hold: anchors of the rest stay in KV memory,
and a hit takes them from there while residuals come from host memory or disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import requests
from harness.client import GenerateClient, Output
from harness.models import DEMO_MODEL
from harness.references import PlainReference, Workload
from harness.scenarios import ALONE, STRICT_CHECKS
from harness.servers import Announce, ServerSpec, ServerSwitch
from harness.suite import Task

pytestmark = pytest.mark.server

PAGE_SIZE = 64
# Of 201 pages in all.
LENGTHS = (300, 1500, 700, 1025, 1400, 1290, 900, 1600, 450, 1150, 1350, 1235)
WORKLOAD = Workload(DEMO_MODEL, LENGTHS, max_new_tokens=24)
NUM_STORED = 40
RESIDUAL_BYTES = 6144 * PAGE_SIZE
# The host store is what runs out, not the KV memory.
STORE = f"--kvspec-host-gb={(NUM_STORED + 0.5) * RESIDUAL_BYTES / 2**30}"
# Of some of the prefixes; the others come from disk.
HOST = "--kvspec-prefix-host-gb=0.03"
KEPT = "--kvspec-prefix-hbm-fraction=0.1"


def server(folder: Path, *more: str) -> ServerSpec:
    arguments = ("--kvspec", STORE, HOST, f"--kvspec-prefix-dir={folder}", *more)
    return STRICT_CHECKS.server(ServerSpec(DEMO_MODEL, arguments))


@pytest.fixture(scope="module")
def reference(servers: ServerSwitch, announce: Announce) -> PlainReference:
    return PlainReference(servers, WORKLOAD, (ALONE,), announce)


def ask(client: GenerateClient, tasks: Sequence[Task], reference: PlainReference) -> list[Output]:
    """Answers to the tasks, one by one, each as plain SGLang gives it."""
    answers = []
    for task in tasks:
        answer = client.generate(task.input_ids, task.max_new_tokens)
        assert answer.output_ids == reference.answer(task), task.name
        assert sum(answer.hit_tokens.values()) == answer.cached_len
        answers.append(answer)
    return answers


def kept_of(answers: Sequence[Output]) -> Counter[str]:
    return sum((Counter(answer.meta["kvspec"]["kept_anchors"]) for answer in answers), Counter())


def hits_of(answers: Sequence[Output]) -> Counter[str]:
    return sum((Counter(answer.hit_tokens) for answer in answers), Counter())


def wait_until_spilled(client: GenerateClient) -> None:
    while client.kvspec_report()["prefix_tiers"]["disk"]["waiting_bytes"]:
        pass


def metric(client: GenerateClient, name: str, tier: str) -> float:
    text = requests.get(f"{client.base_url}/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith(f"sglang:kvspec_{name}_total{{")]
    return sum(float(line.split()[-1]) for line in lines if f'tier="{tier}"' in line)


def test_anchors_stay_where_residuals_must_go(
    servers: ServerSwitch, reference: PlainReference, tmp_path: Path
) -> None:
    client = servers.use(server(tmp_path, KEPT, "--enable-metrics"))
    pools = client.kvspec_report()["pools"]
    assert pools["limited_by"] == "host memory"
    assert pools["residual_store_pages"] == pools["num_pages"] == NUM_STORED
    assert pools["kept_anchor_pages"] > 5 * NUM_STORED
    tasks = reference.suite.prompts
    cold = ask(client, tasks, reference)
    assert not hits_of(cold)
    wait_until_spilled(client)
    again = [*ask(client, tasks[::-1], reference), *ask(client, tasks, reference)]
    hits, kept = hits_of(again), kept_of(again)
    assert min(hits[tier] for tier in ("resident", "host", "disk")) >= PAGE_SIZE
    # What is not resident has its anchors in KV memory, all of it.
    assert kept == Counter({tier: hits[tier] for tier in ("host", "disk")})
    for answer, task in zip(again, [*tasks[::-1], *tasks], strict=True):
        assert answer.cached_len == (len(task.input_ids) - 1) // PAGE_SIZE * PAGE_SIZE
    report = client.kvspec_report()
    assert Counter(report["counters"]["kept_anchors"]) == kept
    tiers = report["prefix_tiers"]
    assert tiers["loaded_bytes"] == {
        "anchors": 0,
        "residuals": sum(kept.values()) // PAGE_SIZE * RESIDUAL_BYTES,
    }
    assert tiers["kept_anchors"]["counters"]["reused"] == sum(kept.values()) // PAGE_SIZE
    assert tiers["kept_anchors"]["counters"]["dropped"] == 0
    for tier in ("host", "disk"):
        assert metric(client, "prefix_kept_anchor_tokens", tier) == kept[tier]
        assert metric(client, "prefix_hit_tokens", tier) == hits[tier]
    client.flush_cache()
    assert client.kvspec_report()["prefix_tiers"]["kept_anchors"]["pages"] == 0
