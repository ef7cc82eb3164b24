"""Prefixes are loaded from host memory and from disk, and answers do not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import requests
from harness.arrival import run_staggered
from harness.client import GenerateClient, Output
from harness.comparison import compare
from harness.faults import fault_environment, fault_file_in
from harness.models import DEMO_MODEL
from harness.prefix_folders import spoil
from harness.progress import Progress
from harness.prompts import cut_prompts
from harness.references import PlainReference, Setting, Workload
from harness.scenarios import FORCED_RETRACTION, STRICT_CHECKS, STRICT_FAMILIES
from harness.servers import Announce, ServerSpec, ServerSwitch
from harness.suite import Answers, Suite, run_one_by_one

from sglang_kvspec.core.sglang_releases import parse_version

pytestmark = pytest.mark.server

# Together one and a half times the pool.
LENGTHS = (300, 1500, 700, 1025)
POOL = "--max-total-tokens=2560"
# Room for some of the pages, and for fewer residuals than anchors.
HOST = "--kvspec-prefix-host-gb=0.012"
NUM_TOKENS = 24
PAGE_SIZE = 64

StartServer = Callable[[], GenerateClient]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_file_in(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def start(servers: ServerSwitch, folder: Path, fault_file: Path) -> StartServer:
    spec = ServerSpec(
        DEMO_MODEL,
        (POOL, "--kvspec", HOST, f"--kvspec-prefix-dir={folder}"),
        (*STRICT_CHECKS.environment, *fault_environment(KVSPEC_FAULT_FILE=fault_file)),
    )
    return lambda: servers.use(spec)


@pytest.fixture(scope="module")
def cold(start: StartServer) -> list[Output]:
    """Answers to prompts that no tier holds. Other tests show that these answers are right."""
    client = start()
    answers = ask(client)
    assert total_hits(answers) == Counter()
    return answers


def ask(client: GenerateClient) -> list[Output]:
    prompts = cut_prompts(DEMO_MODEL, LENGTHS)
    return [client.generate(prompt.input_ids, NUM_TOKENS) for prompt in prompts]


def total_hits(answers: Sequence[Output]) -> Counter[str]:
    """Return the hit tokens by tier, and check that every cached token counts in one tier."""
    for answer in answers:
        assert sum(answer.hit_tokens.values()) == answer.cached_len
    return sum((Counter(answer.hit_tokens) for answer in answers), Counter())


def tokens_of(answers: Sequence[Output]) -> list[tuple[int, ...]]:
    return [answer.output_ids for answer in answers]


def wait_until_spilled(client: GenerateClient) -> None:
    while client.kvspec_report()["prefix_tiers"]["disk"]["waiting_bytes"]:
        pass


def test_hits_from_every_tier(start: StartServer, cold: list[Output]) -> None:
    client = start()
    wait_until_spilled(client)
    again = ask(client)
    assert tokens_of(again) == tokens_of(cold)
    last = cut_prompts(DEMO_MODEL, LENGTHS)[-1]
    repeated = client.generate(last.input_ids, NUM_TOKENS)
    assert repeated.output_ids == cold[-1].output_ids
    hits = total_hits([*again, repeated])
    assert min(hits[tier] for tier in ("resident", "host", "disk")) >= PAGE_SIZE
    # No full page was computed twice.
    for answer, length in zip(again, LENGTHS, strict=True):
        assert answer.cached_len == (length - 1) // PAGE_SIZE * PAGE_SIZE
    report = client.kvspec_report()
    assert Counter(report["counters"]["hit_tokens"]) == hits
    host = report["prefix_tiers"]["host"]
    assert host["counters"]["residuals_evicted"] > 0
    assert host["residuals"] < host["pages"]


@pytest.mark.identity
def test_after_a_kill_and_with_damaged_pages(
    start: StartServer, cold: list[Output], servers: ServerSwitch, folder: Path
) -> None:
    client = start()
    wait_until_spilled(client)
    other = cut_prompts(DEMO_MODEL, (*LENGTHS, 1300))[-1]
    unspilled = client.generate(other.input_ids, NUM_TOKENS)
    # Its pages have not all been written to disk.
    servers.kill()
    # Records lie in the order of spilling: damage the first page of the first prompt, and one in
    # the middle of the second prompt.
    page_bytes = spoil(folder, "residuals.data", 0), spoil(folder, "anchors.data", 20)
    assert page_bytes[0] > page_bytes[1]
    client = start()
    again = ask(client)
    assert tokens_of(again) == tokens_of(cold)
    assert again[0].cached_len == 0
    second = 20 - pages_of(cold[0], LENGTHS[0])
    hits = {"resident": 0, "host": 0, "disk": second * PAGE_SIZE, "remote": 0}
    assert again[1].hit_tokens == hits
    for answer, length in zip(again[2:], LENGTHS[2:], strict=True):
        assert answer.hit_tokens["disk"] == (length - 1) // PAGE_SIZE * PAGE_SIZE
    counters = client.kvspec_report()["prefix_tiers"]["disk"]["counters"]
    assert (counters["damaged_residuals"], counters["damaged_anchors"]) == (1, 1)
    assert client.generate(other.input_ids, NUM_TOKENS).output_ids == unspilled.output_ids


def pages_of(answer: Output, length: int) -> int:
    """Return the number of pages that are full after the answer. Its last token is never fed
    back."""
    return (length + len(answer.output_ids) - 1) // PAGE_SIZE


def test_a_flush_leaves_what_is_on_disk_and_nothing_else(
    start: StartServer, cold: list[Output]
) -> None:
    client = start()
    ask(client)
    client.flush_cache()
    report = client.kvspec_report()
    assert report["pools"]["num_pages_allocated"] == report["pools"]["window_pages_used"] == 0
    assert report["page_states"]["ABSENT"] == report["pools"]["num_pages"] + 1
    assert report["prefix_tiers"]["host"]["pages"] == 0
    again = ask(client)
    assert tokens_of(again) == tokens_of(cold)
    assert total_hits(again)["disk"] > 0


@pytest.fixture
def late(fault_file: Path) -> Iterator[None]:
    """While a test runs, the scheduler receives a client's next message right behind an answer,
    before it has dropped the request."""
    fault_file.write_text("late_to_receive")
    yield
    fault_file.write_text("none")


@pytest.mark.usefixtures("late")
def test_a_flush_right_behind_an_answer(start: StartServer, cold: list[Output]) -> None:
    client = start()
    for _ in range(2):
        assert tokens_of(ask(client)) == tokens_of(cold)
        # Without a timeout, SGLang does not wait until a request has ended.
        reply = requests.post(f"{client.base_url}/flush_cache", timeout=60)
        assert reply.ok, reply.text
        assert client.kvspec_report()["pools"]["num_pages_allocated"] == 0


def test_an_update_of_weights_ends_the_use_of_the_disk(
    start: StartServer, cold: list[Output], late: None
) -> None:
    client = start()
    ask(client)
    reply = requests.post(
        f"{client.base_url}/update_weights_from_disk",
        json={"model_path": str(DEMO_MODEL)},
        timeout=60,
    )
    assert reply.json()["success"], reply.text
    before = client.kvspec_report()["prefix_tiers"]["disk"]
    assert before["is_stale"]
    again = ask(client)
    # The test loads the same weights, so answers do not change.
    assert tokens_of(again) == tokens_of(cold)
    assert total_hits(again)["disk"] == 0
    after = client.kvspec_report()["prefix_tiers"]["disk"]
    assert after["counters"]["anchors_written"] == before["counters"]["anchors_written"]


@pytest.mark.skipif(
    parse_version(version("sglang")) < (0, 5, 21), reason="SGLang has no sessions of updates"
)
def test_a_session_of_updates_ends_the_use_of_the_disk(
    servers: ServerSwitch, start: StartServer, cold: list[Output]
) -> None:
    servers.release()
    client = start()
    assert not client.kvspec_report()["prefix_tiers"]["disk"]["is_stale"]
    for step in ("begin", "end"):
        reply = requests.post(f"{client.base_url}/{step}_weight_update", json={}, timeout=60)
        assert reply.json()["success"], reply.text
        assert client.kvspec_report()["prefix_tiers"]["disk"]["is_stale"]
    again = ask(client)
    assert tokens_of(again) == tokens_of(cold)
    assert total_hits(again)["disk"] == 0


WORKLOAD = Workload(DEMO_MODEL, (127, 1500, 300, 2600, 192, 350, 200, 1025), max_new_tokens=80)


@pytest.mark.identity
@pytest.mark.parametrize("schedule", ["staggered", "rounds"])
def test_plain_answers_under_pressure_and_after_restarts(
    servers: ServerSwitch, tmp_path: Path, announce: Announce, schedule: str
) -> None:
    """Send families of prompts, all at once, with retractions, in a pool that holds a part of
    them."""
    reference = PlainReference(servers, WORKLOAD, (STRICT_FAMILIES,), announce)
    setting = Setting("exact", "uniform4", schedule)
    # Requests repeat in the same order, so a tier smaller than the pages between two uses has no
    # hit.
    host = "--kvspec-prefix-host-gb=0.05"
    arguments = ("--max-total-tokens=4096", host, f"--kvspec-prefix-dir={tmp_path}")
    spec = STRICT_CHECKS.server(FORCED_RETRACTION.server(setting.server(DEMO_MODEL, *arguments)))
    progress = Progress(f"tiers, {schedule}", announce)
    hits: Counter[str] = Counter()
    for how in ("cold", "again", "restarted", "killed"):
        client = servers.use(spec)
        for drive in (run_staggered, run_one_by_one):
            answers = drive(client, _tasks(reference.suite), progress.done)
            mismatches = compare(answers, reference.expected(STRICT_FAMILIES, answers))
            assert not mismatches, f"{how}: {mismatches}"
            hits += _hits(answers)
        announce(f"{schedule}, {how}: {dict(hits)} tokens hit so far")
        if how == "again":
            servers.release()
        elif how == "restarted":
            servers.kill()
    assert min(hits[tier] for tier in ("resident", "host", "disk")) > 1000


@pytest.mark.identity
@pytest.mark.parametrize("codec", ["log4", "uniform4"])
def test_int8_answers_do_not_depend_on_the_tier(
    servers: ServerSwitch, tmp_path: Path, codec: str
) -> None:
    arguments = (POOL, HOST, f"--kvspec-prefix-dir={tmp_path}")
    spec = Setting("int8", codec).server(DEMO_MODEL, *arguments)
    client = servers.use(spec)
    cold = ask(client)
    assert total_hits(cold) == Counter()
    again = ask(client)
    wait_until_spilled(client)
    servers.kill()
    killed = ask(servers.use(spec))
    assert tokens_of(again) == tokens_of(killed) == tokens_of(cold)
    hits = total_hits([*again, *killed])
    assert min(hits["host"], hits["disk"]) >= PAGE_SIZE


def _tasks(suite: Suite) -> list[object]:
    return [task for family in suite.families for task in (family.leader, family.follower)]


def _hits(answers: Answers) -> Counter[str]:
    return sum((Counter(output.hit_tokens) for _, output in answers), Counter())
