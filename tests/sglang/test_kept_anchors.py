"""Residuals have room for a fifth of the prefixes that the cache is to hold. Anchors of the rest
stay in KV memory, and a hit uses them while residuals come from host memory or disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import requests
from harness.arrival import run_staggered
from harness.client import GenerateClient, Output
from harness.comparison import compare
from harness.models import DEMO_MODEL
from harness.progress import Progress
from harness.prompts import cut_prompts
from harness.references import PlainReference, Setting, Workload
from harness.scenarios import ALONE, FORCED_RETRACTION, STRICT_CHECKS, STRICT_FAMILIES
from harness.servers import Announce, ServerSpec, ServerSwitch
from harness.suite import Task, run_one_by_one

pytestmark = pytest.mark.server

PAGE_SIZE = 64
# Prompts of 201 pages together.
LENGTHS = (300, 1500, 700, 1025, 1400, 1290, 900, 1600, 450, 1150, 1350, 1235)
WORKLOAD = Workload(DEMO_MODEL, LENGTHS, max_new_tokens=24)
NUM_STORED = 40
RESIDUAL_BYTES = 6144 * PAGE_SIZE
# The host store is the limit, not the KV memory.
STORE = f"--kvspec-host-gb={(NUM_STORED + 0.5) * RESIDUAL_BYTES / 2**30}"
# Host memory for some of the prefixes; the others come from disk.
HOST = "--kvspec-prefix-host-gb=0.03"
KEPT = "--kvspec-prefix-hbm-fraction=0.1"
FEW_KEPT = "--kvspec-prefix-hbm-fraction=0.002"


def server(folder: Path, *more: str) -> ServerSpec:
    arguments = ("--kvspec", STORE, HOST, f"--kvspec-prefix-dir={folder}", *more)
    return STRICT_CHECKS.server(ServerSpec(DEMO_MODEL, arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(scope="module")
def client(servers: ServerSwitch, reference: PlainReference, folder: Path) -> GenerateClient:
    return servers.use(server(folder, KEPT, "--enable-metrics"))


@pytest.fixture(scope="module")
def reference(servers: ServerSwitch, announce: Announce) -> PlainReference:
    return PlainReference(servers, WORKLOAD, (ALONE,), announce)


def ask(client: GenerateClient, tasks: Sequence[Task], reference: PlainReference) -> list[Output]:
    """Return the answers to the tasks, sent one by one, and check each against plain SGLang's."""
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
    client: GenerateClient, reference: PlainReference
) -> None:
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
    # All pages that are not resident have their anchors in KV memory.
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


def test_residuals_that_changed_are_computed_again(
    client: GenerateClient, reference: PlainReference, folder: Path
) -> None:
    tasks = reference.suite.prompts
    before = ask(client, tasks, reference)
    wait_until_spilled(client)
    spoil_all(folder)
    after = ask(client, tasks[::-1], reference)
    tiers = client.kvspec_report()["prefix_tiers"]
    assert tiers["disk"]["counters"]["damaged_residuals"] > 0
    assert hits_of(after)["disk"] == 0
    assert hits_of(after)["host"] == kept_of(after)["host"] > 0
    assert hits_of(after).total() < hits_of(before).total()
    # Pages that were computed again are kept again.
    wait_until_spilled(client)
    again = ask(client, tasks, reference)
    assert kept_of(again)["disk"] > 0


def test_a_flush_forgets_anchors(client: GenerateClient, reference: PlainReference) -> None:
    ask(client, reference.suite.prompts[:4], reference)
    client.flush_cache()
    report = client.kvspec_report()
    assert report["prefix_tiers"]["kept_anchors"]["pages"] == 0
    assert report["pools"]["num_pages_allocated"] == 0
    fresh = ask(client, reference.suite.prompts[:1], reference)
    assert (hits_of(fresh)["disk"] > 0, kept_of(fresh).total()) == (True, 0)


def spoil_all(folder: Path) -> None:
    """Flip a bit of every residual on disk."""
    (path,) = folder.rglob("residuals.data")
    with path.open("r+b") as file:
        for start in range(0, path.stat().st_size, RESIDUAL_BYTES):
            file.seek(start + RESIDUAL_BYTES // 2)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))


@pytest.mark.identity
@pytest.mark.parametrize("schedule", ["staggered", "rounds"])
def test_plain_answers_under_pressure(
    servers: ServerSwitch, tmp_path: Path, announce: Announce, schedule: str
) -> None:
    """Send families of prompts repeatedly and all at once, with retractions. There are too few
    slots for all anchors."""
    workload = Workload(DEMO_MODEL, (127, 1500, 300, 2600, 192, 350, 200, 1025), max_new_tokens=80)
    reference = PlainReference(servers, workload, (STRICT_FAMILIES,), announce)
    setting = Setting("exact", "uniform4", schedule)
    arguments = ("--max-total-tokens=4096", HOST, f"--kvspec-prefix-dir={tmp_path}", FEW_KEPT)
    spec = STRICT_CHECKS.server(FORCED_RETRACTION.server(setting.server(DEMO_MODEL, *arguments)))
    client = servers.use(spec)
    tasks = [
        task for family in reference.suite.families for task in (family.leader, family.follower)
    ]
    progress = Progress(f"kept anchors, {schedule}", announce)
    for drive in (run_staggered, run_one_by_one, run_staggered, run_one_by_one):
        answers = drive(client, tasks, progress.done)
        mismatches = compare(answers, reference.expected(STRICT_FAMILIES, answers))
        assert not mismatches, mismatches
    kept = client.kvspec_report()["prefix_tiers"]["kept_anchors"]
    announce(f"{schedule}: {kept}")
    # The number of slots, and so whether any page is evicted, depends on the machine.
    assert kept["counters"]["reused"] > 0
    assert kept["pages"] <= kept["slots"]


@pytest.mark.identity
@pytest.mark.parametrize("codec", ["log4", "uniform4"])
def test_int8_answers_do_not_depend_on_kept_anchors(
    servers: ServerSwitch, tmp_path: Path, codec: str
) -> None:
    """Anchors are half of the bytes that this target reads."""
    arguments = ("--max-total-tokens=2560", f"--kvspec-prefix-dir={tmp_path}", KEPT)
    client = servers.use(Setting("int8", codec).server(DEMO_MODEL, *arguments))
    prompts = cut_prompts(DEMO_MODEL, LENGTHS[:5])
    cold, again = ([client.generate(prompt.input_ids, 24) for prompt in prompts] for _ in range(2))
    assert [answer.output_ids for answer in again] == [answer.output_ids for answer in cold]
    assert kept_of(again)["disk"] == hits_of(again)["disk"] > 1000
    assert client.kvspec_report()["prefix_tiers"]["loaded_bytes"]["anchors"] == 0
