"""A prefill and a decode server together give the answers of plain SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import add, le
from typing import Any

import pytest
import requests
from hardening.fuzzer import Fuzzer, ask_generate, held_by, run
from harness.client import Output
from harness.feature_answers import CHAT_TEMPLATE, SEEDS, answer_to, assert_same, sample
from harness.features import CASES, generate
from harness.models import DEMO_MODEL
from harness.pair import Pair, PairClient, PairSpec, wait_until
from harness.references import PlainReference, Workload
from harness.scenarios import STRICT_CHECKS, retract_every
from harness.servers import START_TIMEOUT_S, Announce
from harness.soak import Soak
from harness.suite import Suite, run_one_by_one

from kvspec_testkit.servers.door_process import open_door
from kvspec_testkit.servers.transfer_report import read_transfer_report
from sglang_kvspec.core.config import MOST_AUTO_DRAFTS

pytestmark = pytest.mark.server

POOL = "--max-total-tokens=24576"
# About a second for the residuals of 1000 tokens: drafts must be made on anchors alone.
SLOW_LINK = "--kvspec-link-gbps=0.006"
LENGTHS = (64, 127, 1500, 300, 192, 1025, 65, 700)
WORKLOAD = Workload(DEMO_MODEL, LENGTHS, max_new_tokens=48)
FAMILIES = True
# Two servers that check their memory at every step. One retracts, often: short answers take few
# steps together.
PAIR = PairSpec(
    DEMO_MODEL,
    (POOL, "--chunked-prefill-size=512", CHAT_TEMPLATE),
    prefill=(SLOW_LINK,),
    environment=dict(STRICT_CHECKS.environment + retract_every(2)),
)
# Cases of one server, except those that the door refuses or has no path for.
REFUSED = ("logprobs", "several_samples", "prompt_only", "logprobs_of_no_token")
WITHOUT_PATH = ("cached_prefix", "session", "pause_and_continue")
# Cases with many prompts, each with a second of residuals on the slow link.
LONG = ("stop_string_at_length_limit", "stop_token_at_length_limit")
SAME = [name for name in CASES if name not in (*REFUSED, *WITHOUT_PATH, *LONG)]


@pytest.fixture(scope="module")
def url(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a door to both servers."""
    log_path = tmp_path_factory.mktemp("door") / "door.log"
    with open_door(pair, log_path, START_TIMEOUT_S) as door_url:
        yield door_url


@pytest.fixture
def client(pair: Pair) -> PairClient:
    return pair.client


def transfer_of(output: Output) -> dict[str, Any]:
    return dict(output.meta["kvspec"]["transfer"])


def test_one_at_a_time(client: PairClient, reference: PlainReference) -> None:
    answers = run_one_by_one(client, reference.suite.prompts, lambda: None)
    reference.check(answers)
    longest = max(answers, key=lambda answer: len(answer[0].input_ids))[1]
    transfer = transfer_of(longest)
    seconds = transfer["seconds"]
    assert transfer["mode"] == "split"
    assert 0 < seconds["anchors"] < seconds["residuals"] <= seconds["first_verification"]
    # The request drafted while its residuals were on the link. How many drafts there are depends on
    # the machine.
    drafts = transfer["drafts_s"]
    assert len(drafts) <= MOST_AUTO_DRAFTS
    assert sum(at < seconds["residuals"] for at in drafts) > 4
    assert len(longest.meta["kvspec_token_s"]) == len(longest.output_ids)


def test_prefix_hits_on_the_prefill_side(client: PairClient, reference: PlainReference) -> None:
    tasks = [
        task for family in reference.suite.families for task in (family.leader, family.follower)
    ]
    answers = run_one_by_one(client, tasks, lambda: None)
    reference.check(answers)
    assert sum(output.cached_len for _, output in answers) > 0


def test_all_at_once(client: PairClient, reference: PlainReference, announce: Announce) -> None:
    tasks = reference.suite.prompts
    with ThreadPoolExecutor(len(tasks)) as pool:
        outputs = pool.map(lambda t: client.generate(t.input_ids, t.max_new_tokens), tasks)
        answers = list(zip(tasks, outputs, strict=True))
    reference.check(answers)
    num_retractions = sum(output.num_retractions for _, output in answers)
    announce(f"two servers: {num_retractions} retractions of {len(answers)} requests")
    assert num_retractions > 0


def test_requests_that_come_and_go(
    client: PairClient, reference: PlainReference, announce: Announce
) -> None:
    """Abort requests or hang up, wherever their KV is. No page stays allocated on either server."""
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


@pytest.fixture(scope="module")
def answers(url: str) -> Iterator[dict[str, Future[Any]]]:
    """Answers to every case. Cases run side by side, and the requests of one case one after the
    other."""
    with ThreadPoolExecutor(len(SAME)) as pool:
        yield {name: pool.submit(answer_to, name, url) for name in SAME}


@pytest.mark.parametrize("name", SAME)
def test_same_as_plain(
    name: str, answers: dict[str, Future[Any]], plain_answers: dict[str, Any]
) -> None:
    assert_same(answers[name].result(), plain_answers[name], name)


@pytest.mark.identity
@pytest.mark.parametrize("name", LONG)
def test_same_as_plain_in_full(name: str, url: str, plain_answers: dict[str, Any]) -> None:
    assert_same(answer_to(name, url), plain_answers[name], name)


def test_seeds_repeat_and_differ(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: sample(url, seed), (1, 2, 3, 4)))
    assert sample(url, 1) == together[0], "a seed must not depend on what runs beside it"
    assert len(set(map(tuple, together))) == 4


@pytest.mark.identity
def test_seeds_give_what_they_give_on_one_server(
    url: str, seeded_answers: dict[int, list[int]]
) -> None:
    assert {seed: sample(url, seed) for seed in SEEDS} == seeded_answers


def test_other_prompts_of_the_same_length_fail(client: PairClient) -> None:
    """Check prompts that differ on the last page, and on a page that was sent before."""
    for place in (0, 99):
        body = {"sampling_params": {"max_new_tokens": 4}, **client.room()}
        prompt, other = list(range(20, 120)), list(range(20, 120))
        other[place] += 1
        client.prefill_only({**body, "input_ids": prompt})
        reply = requests.post(
            f"{client.base_url}/generate", json={**body, "input_ids": other}, timeout=60
        )
        assert reply.status_code == 500
        assert "computed another prompt of the same length" in reply.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bootstrap_host": None}, "bootstrap_host is missing"),
        ({"session_params": {"id": "unknown"}}, "session_params cannot be combined"),
        ({"sampling_params": {"n": 2}}, "n > 1 cannot be combined"),
        (
            {"return_logprob": True, "token_ids_logprob": [5]},
            "token_ids_logprob cannot be combined",
        ),
        (
            {"return_logprob": True, "sampling_params": {"max_new_tokens": 0}},
            "return_logprob with max_new_tokens 0 cannot be combined",
        ),
        ({"return_logprob": True, "top_logprobs_num": 129}, "top_logprobs_num must be at most 128"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refuses_what_it_cannot_serve(
    client: PairClient, fields: dict[str, Any], words: str
) -> None:
    """Send each request to either server. Most of them would end a server of plain SGLang."""
    body = {"input_ids": [20, 21, 22], **client.room(), **fields}
    for server in (client, client.prefill):
        reply = requests.post(f"{server.base_url}/generate", json=body, timeout=60)
        assert reply.status_code == 400, reply.text
        assert words in reply.text


def test_a_grammar_that_cannot_be_compiled(url: str) -> None:
    body = {"text": "x", "sampling_params": {"regex": "(["}}
    reply = requests.post(f"{url}/generate", json=body, timeout=60)
    assert reply.status_code == 400
    assert "Failed to compile regex grammar" in reply.text
    assert generate(url, "x", regex="yes")["text"] == "yes"


def allocated_pages(client: PairClient) -> int:
    return int(client.prefill.kvspec_report()["pools"]["num_pages_allocated"])


@pytest.mark.parametrize("role", ["prefill", "decode", "door"])
def test_either_server_and_the_door_survive_generated_requests(
    pair: Pair, url: str, role: str
) -> None:
    sides = {"prefill": pair.prefill, "decode": pair.decode}
    holders = [side.base_url for side in sides.values()]
    fuzzer = Fuzzer(
        sides[role].base_url if role in sides else url,
        ask=lambda prompt: ask_generate(url, prompt),
        held=lambda: "; ".join(filter(None, map(held_by, holders))),
        logs=[side.log_path for side in sides.values()],
    )
    assert run(fuzzer, 4096, 60, seed=2).findings() == []


def test_a_decode_server_that_works_in_rounds(pair: Pair, reference: PlainReference) -> None:
    """Run the schedule of a GPU. The test is the last of this module, since it restarts the decode
    server."""
    # A retracted request would lose the times of its transfer.
    pair.restart_decode("--kvspec-schedule=rounds", environment=dict(STRICT_CHECKS.environment))
    client, tasks = pair.client, reference.suite.prompts
    with ThreadPoolExecutor(len(tasks)) as pool:
        outputs = pool.map(lambda t: client.generate(t.input_ids, t.max_new_tokens), tasks)
        answers = list(zip(tasks, outputs, strict=True))
    reference.check(answers)
    reports = [
        read_transfer_report(output.meta) for task, output in answers if len(task.input_ids) > 64
    ]
    residuals = [report.transfer.seconds.residuals for report in reports]
    verified = [report.transfer.seconds.first_verification for report in reports]
    assert all(map(le, residuals, verified))
    assert max(report.transfer.drafts_before_residuals for report in reports) > 0
    begun = [report.transfer.prefill_ended_at for report in reports]
    soonest = min(map(add, begun, verified))
    assert soonest < max(map(add, begun, residuals)), "all have waited for the last residuals"
