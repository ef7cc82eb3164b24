"""Pre-launched rounds, and tokens taken without drafts, give the answers of plain SGLang.

A CPU runs the work of a GPU's side streams at once here; see faults/kvspec_ahead.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from harness.client import GenerateClient
from harness.comparison import compare
from harness.faults import fault_environment
from harness.feature_answers import KVSPEC, PLAIN, answer_to, assert_same, report_of
from harness.features import CASES, LONG_PROMPT, PROMPT, essence, events, generate, post
from harness.models import DEMO_MODEL
from harness.references import PlainReference, Setting, UndraftedReference, Workload
from harness.scenarios import CHUNKED_RETRACTION, STAGGERED, retract_every
from harness.servers import Announce, ServerSwitch

pytestmark = pytest.mark.server

AHEAD = fault_environment(KVSPEC_AHEAD_SEED=5)
NO_STORE = "--kvspec-host-gb=0"
# Retract every 7 iterations: a round emits many tokens, so iterations are about a tenth as many.
HARSH = replace(
    CHUNKED_RETRACTION,
    environment=(*CHUNKED_RETRACTION.environment, *retract_every(7)),
)
SERVER = HARSH.server(
    replace(
        KVSPEC,
        arguments=(*KVSPEC.arguments, NO_STORE),
        environment=AHEAD,
    )
)
# This server's cache has room for the residuals of few requests, so that other requests draft
# meanwhile.
SMALL_CACHE = fault_environment(KVSPEC_AHEAD_SEED=5, KVSPEC_CACHE_PAGES=10)
HOSTED = HARSH.server(replace(KVSPEC, environment=SMALL_CACHE))

# Lengths around a page's end, so that answers begin at every place of a page.
LENGTHS = (61, 62, 63, 64, 65, 66, 127, 128, 300, 513, 1500)
WORKLOAD = Workload(DEMO_MODEL, LENGTHS, max_new_tokens=80)
WORKLOAD_INT8 = Workload(DEMO_MODEL, (61, 64, 127, 300, 700), max_new_tokens=80)

# Requests of a crowd. Each is also sent alone to a plain server.
Ask = Callable[[str], Any]
SAMPLED = {"temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 40}


def _logprobs(url: str) -> Any:
    request = {"return_logprob": True, "top_logprobs_num": 2}
    answer = generate(url, PROMPT, max_new_tokens=30, request=request)
    names = ("output_token_logprobs", "output_top_logprobs")
    return {name: answer["meta_info"][name] for name in names}


def _streamed(url: str) -> Any:
    params = {"temperature": 0, "max_new_tokens": 90, "ignore_eos": True}
    body = {"text": LONG_PROMPT, "sampling_params": params}
    *_, last = events(url, "/generate", body)
    return essence(last)


ASKS: dict[str, Ask] = {
    "long": lambda url: essence(generate(url, max_new_tokens=150, ignore_eos=True)),
    "short": lambda url: essence(generate(url, PROMPT, max_new_tokens=40)),
    "one": lambda url: essence(generate(url, PROMPT, max_new_tokens=1)),
    "two": lambda url: essence(generate(url, PROMPT, max_new_tokens=2)),
    "three": lambda url: essence(generate(url, PROMPT, max_new_tokens=3)),
    "stop": lambda url: essence(generate(url, stop=["self.path"])),
    "stop token": lambda url: essence(generate(url, stop_token_ids=list(range(10, 60)))),
    "penalty": lambda url: essence(generate(url, frequency_penalty=0.7, max_new_tokens=30)),
    "grammar": lambda url: essence(generate(url, regex=r"[a-f]{3,12}-[0-9]{2,9}")),
    "streamed": _streamed,
    "logprobs": _logprobs,
}


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.fixture(scope="module")
def plain_asks(servers: ServerSwitch) -> dict[str, Any]:
    url = servers.use(PLAIN).base_url
    return {name: as_json(ask(url)) for name, ask in ASKS.items()}


# Requests that prevent pre-launched rounds while they run.
SPECIAL = ("penalty", "grammar", "logprobs", "sampled")


# With few concurrent requests, a pre-launched round often loses all requests that drafted in it, or
# its plan all requests that were to verify.
@pytest.mark.parametrize(("seed", "concurrent"), [(4, 6), (5, 3)])
def test_requests_join_and_leave_while_residuals_move(
    servers: ServerSwitch, plain_asks: dict[str, Any], seed: int, concurrent: int
) -> None:
    _answers_as_asked_alone(servers.use(HOSTED).base_url, plain_asks, seed, concurrent)


def test_plans_meet_changed_batches(servers: ServerSwitch) -> None:
    report = report_of(servers.use(HOSTED).base_url)
    fates = report["ahead"]
    for fate in ("planned", "planned for some who left", "planned again"):
        assert fates.get(fate), fates
    assert report["counters"]["drafted_piggyback"]


@pytest.mark.parametrize(
    ("seed", "concurrent"),
    [(0, 10), pytest.param(1, 6, marks=pytest.mark.identity), (2, 4), (3, 2)],
)
def test_requests_join_and_leave(
    servers: ServerSwitch, plain_asks: dict[str, Any], seed: int, concurrent: int
) -> None:
    url = servers.use(SERVER).base_url
    _answers_as_asked_alone(url, plain_asks, seed, concurrent)
    report = report_of(url)
    # Where residuals stay in the cache, all requests verify at once.
    assert not report["counters"]["drafted_piggyback"]
    assert not [fate for fate in report["ahead"] if fate.startswith("planned")]


def _answers_as_asked_alone(
    url: str, plain_asks: dict[str, Any], seed: int, concurrent: int
) -> None:
    sampled_alone = generate(url, **SAMPLED)["output_ids"]
    rng = random.Random(seed)
    greedy = [name for name in ASKS if name not in SPECIAL] + ["aborted", "hung up"]
    names = [*3 * greedy, *SPECIAL]
    rng.shuffle(names)
    cuts = {place: rng.randint(0, 40) for place in range(len(names))}

    def send(place: int) -> Any:
        name = names[place]
        if name == "sampled":
            return generate(url, **SAMPLED)["output_ids"]
        if name in ("aborted", "hung up"):
            client = GenerateClient(url)
            client.cut_short(range(20, 170), 100, cuts[place], by_id=name == "aborted")
            return None
        return as_json(ASKS[name](url))

    with ThreadPoolExecutor(concurrent) as pool:
        answers = list(pool.map(send, range(len(names))))
    for name, answer in zip(names, answers, strict=True):
        if name == "sampled":
            assert answer == sampled_alone
        elif name in ASKS:
            assert_same(answer, plain_asks[name], name)


def test_rounds_meet_changed_batches(servers: ServerSwitch) -> None:
    fates = report_of(servers.use(SERVER).base_url)["ahead"]
    for made in ("drafted", "plain"):
        assert fates.get(f"{made} same"), fates
        assert fates.get(f"{made} grew"), fates
        assert fates.get(f"{made} shrank") or fates.get(f"{made} moved"), fates
    assert fates["went on"], fates


def test_new_weights_while_requests_wait(servers: ServerSwitch, plain_asks: dict[str, Any]) -> None:
    """Load the same weights again, so that the answer must not change."""
    url = servers.use(SERVER).base_url
    params = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
    last: dict[str, Any] = {}
    for number, chunk in enumerate(
        events(url, "/generate", {"text": LONG_PROMPT, "sampling_params": params})
    ):
        if number == 2:
            post(url, "/pause_generation", {"mode": "in_place"})
            update = {"model_path": str(DEMO_MODEL), "flush_cache": False}
            assert post(url, "/update_weights_from_disk", update)["success"]
            post(url, "/continue_generation", {})
        last = chunk
    assert essence(last) == plain_asks["long"]


def test_nothing_stays_behind(servers: ServerSwitch) -> None:
    client = servers.use(SERVER)
    generate(client.base_url, max_new_tokens=20)
    client.flush_cache()
    report = report_of(client.base_url)
    assert report["page_states"]["ABSENT"] == report["pools"]["num_pages"] + 1
    assert report["pools"]["window_pages_used"] == 0


def test_only_drafts_are_reported_as_drafts(servers: ServerSwitch) -> None:
    url = servers.use(SERVER).base_url
    meta = generate(url, max_new_tokens=200, ignore_eos=True)["meta_info"]
    report = meta["kvspec"]
    assert 0 < report["accepted"] <= report["drafted"]
    assert 0 < meta["spec_accept_rate"] <= 1
    assert sum(report["accept_histogram"]) == report["verified"]
    weighted = sum(n * count for n, count in enumerate(report["accept_histogram"]))
    assert weighted == report["accepted"]


@pytest.mark.identity
def test_exact_in_small_chunks_with_retraction(servers: ServerSwitch, announce: Announce) -> None:
    reference = PlainReference(servers, WORKLOAD, (HARSH,), announce)
    setting = Setting("exact", "uniform4", "rounds")
    base = replace(setting.server(DEMO_MODEL, NO_STORE), environment=AHEAD)
    client = servers.use(HARSH.server(base))
    answers = HARSH.run(client, reference.suite, lambda: None)
    mismatches = compare(answers, reference.expected(HARSH, answers))
    assert not mismatches, "\n".join(map(str, mismatches))
    HARSH.check(answers, servers.log_path)


@pytest.mark.identity
def test_int8(servers: ServerSwitch, announce: Announce) -> None:
    setting = Setting("int8", "uniform4", "rounds")
    reference = UndraftedReference(servers, WORKLOAD_INT8, setting, (STAGGERED,), announce)
    base = replace(setting.server(DEMO_MODEL, NO_STORE), environment=AHEAD)
    client = servers.use(STAGGERED.server(base))
    answers = STAGGERED.run(client, reference.suite, lambda: None)
    mismatches = compare(answers, reference.expected(STAGGERED, answers))
    assert not mismatches, "\n".join(map(str, mismatches))


@pytest.mark.identity
def test_all_cases(servers: ServerSwitch, plain_answers: dict[str, Any]) -> None:
    url = servers.use(SERVER).base_url
    for name in CASES:
        assert_same(answer_to(name, url), plain_answers[name], name)
