"""Every use of SGLang gives the same answer with --kvspec as without."""

from __future__ import annotations

import re
import threading
from importlib import metadata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from harness import dashboard
from harness.feature_answers import (
    KVSPEC,
    KVSPEC_NGRAM,
    KVSPEC_STAGGERED,
    answer_to,
    assert_same,
    report_of,
    sample,
)
from harness.features import CASES, LONG_PROMPT, essence, events, generate, post
from harness.servers import ServerSwitch
from sglang.srt.managers.io_struct import GenerateReqInput

from kvspec_testkit.monitoring import dashboard_queries, metric_names

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def url(servers: ServerSwitch, plain_answers: dict[str, Any]) -> str:
    return servers.use(KVSPEC).base_url


@pytest.mark.parametrize("name", CASES)
def test_same_as_plain(name: str, url: str, plain_answers: dict[str, Any]) -> None:
    assert_same(answer_to(name, url), plain_answers[name], name)


@pytest.mark.identity
def test_all_cases_staggered(servers: ServerSwitch, plain_answers: dict[str, Any]) -> None:
    url = servers.use(KVSPEC_STAGGERED).base_url
    for name in CASES:
        assert_same(answer_to(name, url), plain_answers[name], name)


@pytest.mark.identity
def test_all_cases_with_proposals_of_ngrams(
    servers: ServerSwitch, plain_answers: dict[str, Any], seeded_answers: dict[int, list[int]]
) -> None:
    url = servers.use(KVSPEC_NGRAM).base_url
    for name in CASES:
        assert_same(answer_to(name, url), plain_answers[name], name)
    for seed, expected in seeded_answers.items():
        assert sample(url, seed) == expected
    assert report_of(url)["ngram"]["kept"] > 0


def test_comparison_notices_a_difference() -> None:
    for actual in ({"a": [1, 2.5]}, {"a": [1, 2.0, 3]}, {"a": [2, 2.0]}, {"b": [1, 2.0]}):
        with pytest.raises(AssertionError):
            assert_same(actual, {"a": [1, 2.0]}, "case")


def test_drafts_were_accepted_and_reported(url: str) -> None:
    answer = generate(url, max_new_tokens=200, ignore_eos=True)
    report = answer["meta_info"]["kvspec"]
    assert report["accepted"] <= report["drafted"]
    assert report["accepted"] + report["verified"] == 199, "one token comes from the prefill"
    assert sum(report["accept_histogram"]) == report["verified"]
    assert report["verified"] < 100, "two tokens a verification would be no speculation at all"
    counts = {"verifications": "verified", "drafted": "drafted", "accepted": "accepted"}
    assert report["draft_reads"] == {
        "share": 1.0,
        "mass": 1.0,
        "selection_ms": 0.0,
        "by_budget": {"1.0": {name: report[ours] for name, ours in counts.items()}},
    }
    assert "draft_reads" not in (answer["meta_info"]["cached_tokens_details"] or {})


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_counts_accepted_and_rejected_drafts(url: str, path: str, n: int) -> None:
    prompt: dict[str, Any] = {"prompt": LONG_PROMPT}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": LONG_PROMPT}]}
    body = {"model": "m", **prompt, "temperature": 0, "max_tokens": 60, "n": n}
    whole = post(url, path, body)["usage"]
    *_, last = events(url, path, {**body, "stream_options": {"include_usage": True}})
    for usage in (whole, last["usage"]):
        details = usage["completion_tokens_details"]
        assert 0 < details["accepted_prediction_tokens"] < usage["completion_tokens"]
        assert details["rejected_prediction_tokens"] >= 0


def test_seeds_repeat_and_differ(url: str, seeded_answers: dict[int, list[int]]) -> None:
    together: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda s=seed: together.update({s: sample(url, s)}))
        for seed in (1, 2, 3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = {seed: together[seed] for seed in seeded_answers}
    assert seeded_answers == alone, "a seed must not depend on what runs beside it"
    assert len({tuple(ids) for ids in together.values()}) == 4


def test_abort_ends_a_stream_and_frees_its_pages(url: str) -> None:
    body = {
        "text": LONG_PROMPT,
        "rid": "to-be-aborted",
        "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True},
    }
    last: dict[str, Any] = {}
    for number, chunk in enumerate(events(url, "/generate", body)):
        if number == 2:
            post(url, "/abort_request", {"rid": "to-be-aborted"})
        last = chunk
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] < 4000
    generate(url, max_new_tokens=4)
    requests.post(f"{url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()
    report = report_of(url)
    absent = report["page_states"].pop("ABSENT")
    assert absent == report["pools"]["num_pages"] + 1
    assert report["pools"]["window_pages_used"] == 0


def test_an_answer_of_one_token_leaves_nothing_in_the_window(url: str) -> None:
    for length in (64, 70, 130):
        generate(url, max_new_tokens=1, request={"text": None, "input_ids": [66] * length})
    assert report_of(url)["pools"]["window_pages_used"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_hidden_states", True),
        ("custom_logit_processor", '{"callable": "00"}'),
        # Since 0.5.21.
        *[("token_indices_to_pool", [0])] * hasattr(GenerateReqInput, "token_indices_to_pool"),
        # Since 0.5.22.
        *[("watermark", {"enabled": True})] * hasattr(GenerateReqInput, "watermark"),
    ],
)
def test_refuses_what_it_cannot_serve(url: str, field: str, value: Any) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 4}, field: value}
    reply = requests.post(f"{url}/generate", json=body, timeout=60)
    assert reply.status_code == 400
    assert "--kvspec" in reply.text
    assert field.split("_")[-1] in reply.text.replace(" ", "_")


NOTHING = {"ebnf": "root ::= root", "max_new_tokens": 8}
GENERATE, DETOKENIZE = "/generate", "/v1/detokenize"
# Since 0.5.22 SGLang itself refuses values of a wrong type, in an answer that names no field.
CHECKS_TYPES = find_spec("sglang.srt.entrypoints.api_contract") is not None
# Each of these would end the scheduler of a plain server, or be answered with status 500.
HOSTILE: dict[str, tuple[str, Any, str]] = {
    "top logprobs beyond the vocabulary": (
        *(GENERATE, {"text": "x", "return_logprob": True, "top_logprobs_num": 100_000}),
        "top_logprobs_num",
    ),
    **{
        f"{name} {value!r}": (
            *(GENERATE, {"text": "x", "sampling_params": {name: value}}),
            "invalid type" if CHECKS_TYPES else name,
        )
        for name, value in (("max_new_tokens", 1.5), ("max_new_tokens", "x"), ("top_k", 1.5))
    },
    **{
        f"n {value}": (GENERATE, {"text": "x", "sampling_params": {"n": value}}, "n")
        for value in (0, -1, 100_000, None)
    },
    **{
        f"input_ids {ids}": (GENERATE, {"input_ids": ids}, words)
        for ids, words in (
            *(([1, 100_000_000], "input_ids"), ([-1], "input_ids"), ([[1], [2, -5]], "input_ids")),
            *(([[]], "no tokens"), ([], "input_ids")),
        )
    },
    **{
        f"empty grammar {kind}": (GENERATE, {"text": "x", "sampling_params": params}, "grammar")
        for kind, params in (
            ("greedy", {**NOTHING, "temperature": 0}),
            ("sampled", {**NOTHING, "temperature": 0.9}),
            ("seeded", {**NOTHING, "temperature": 0.9, "sampling_seed": 3}),
            ("biased", {**NOTHING, "temperature": 0, "logit_bias": {"5": 1.0}}),
        )
    },
    "overrides": (
        *(GENERATE, {"text": "x", "positional_embed_overrides": [1]}),
        "positional_embed_overrides",
    ),
    "completions of no sample": ("/v1/completions", {"model": "m", "prompt": "x", "n": 0}, "n"),
    "completions of too many": (
        *("/v1/completions", {"model": "m", "prompt": "x", "n": 100_000}),
        "n must be at most 384",
    ),
    "a chat that is no object": ("/v1/chat/completions", "x", "JSON object"),
    "tokens below the vocabulary": (DETOKENIZE, {"model": "m", "tokens": [-5]}, "tokens"),
    "tokens beyond the vocabulary": (DETOKENIZE, {"model": "m", "tokens": [10**8]}, "tokens"),
}


@pytest.fixture(scope="module")
def valid_answer(url: str) -> dict[str, Any]:
    return essence(generate(url, max_new_tokens=8))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_requests_are_refused(name: str, url: str, valid_answer: dict[str, Any]) -> None:
    path, body, words = HOSTILE[name]
    reply = requests.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    assert words in reply.text
    assert essence(generate(url, max_new_tokens=8)) == valid_answer


def test_a_request_without_an_allowed_token_fails_alone(
    url: str, valid_answer: dict[str, Any]
) -> None:
    """A request whose grammar allows no token fails, while a stream beside it continues."""
    body = {"text": LONG_PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 200}}
    whole = essence(post(url, "/generate", body))
    chunks, refused = [], None
    for number, chunk in enumerate(events(url, "/generate", body)):
        if number == 2:
            request = {"text": "x", "sampling_params": {**NOTHING, "temperature": 0.9}}
            refused = requests.post(f"{url}/generate", json=request, timeout=60)
        chunks.append(chunk)
    assert refused is not None
    assert refused.status_code == 400
    assert essence(chunks[-1]) == whole


def test_a_paced_stream_brings_tokens_one_by_one(url: str) -> None:
    params = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    body = {"text": LONG_PROMPT, "sampling_params": params}
    whole = generate(url, max_new_tokens=200, ignore_eos=True)
    chunks = list(events(url, "/generate", body))
    assert essence(chunks[-1]) == essence(whole)
    texts = [chunk["text"] for chunk in chunks]
    for before, after in pairwise(texts):
        assert after.startswith(before)
    sizes = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    steps = [after - before for before, after in pairwise([0, *sizes])]
    assert all(step > 0 for step in steps)
    # Tokens that are released at the end of a round share a chunk; on a busy machine some others
    # do, too.
    assert len(steps) > 2 * whole["meta_info"]["kvspec"]["verified"]
    assert steps.count(1) > len(steps) / 2


def test_server_info_and_metrics(url: str) -> None:
    generate(url, max_new_tokens=60, ignore_eos=True)
    report = report_of(url)
    assert report["config"]["codec"] == "uniform4"
    assert report["pools"]["kv_bytes_allocated"] <= report["pools"]["kv_bytes"]
    assert report["config"]["schedule"] == "auto"
    assert report["resolved"]["schedule"] == "rounds"
    assert report["resolved"]["host_bytes"] == report["pools"]["host_bytes"] > 0
    assert report["counters"]["accepted"] > 0
    assert report["anchor_bits_per_element"] <= 4.6
    text = requests.get(f"{url}/metrics", timeout=60).text
    for name in (
        "accept_length_bucket",
        "drafted_tokens_total",
        "accepted_tokens_total",
        "rejected_tokens_total",
        "verifications_total",
        "residual_bytes_total",
        "verification_wait_iterations_total",
        "anchor_bits_per_element",
        "pages",
    ):
        assert f"sglang:kvspec_{name}{{" in text, name
    assert 'reason="test"' not in text
    assert 'model_name="None"' not in text


def test_the_dashboard_shows_the_server(url: str, tmp_path: Path) -> None:
    generate(url, max_new_tokens=60, ignore_eos=True)
    queries = dashboard_queries()
    filled = [query for query in queries if query.row in dashboard.FILLED]
    # These panels have samples only after a retraction, or after residuals were fetched.
    unseen = ("Retracted requests", "Speed of the link")
    filled = [query for query in filled if query.panel not in unseen]
    assert filled
    if not dashboard.has_prometheus():
        text = requests.get(f"{url}/metrics", timeout=60).text
        named = {name for query in filled for name in metric_names(query.text)}
        missing = {name for name in named if f"{name}{{" not in text}
        assert not missing
        return
    with dashboard.prometheus(url, tmp_path) as prometheus_url:
        asked = {query: dashboard.ask(prometheus_url, query.text) for query in queries}
        assert [query for query in filled if not asked[query]] == []
        rules = requests.get(f"{prometheus_url}/api/v1/rules", timeout=30).json()["data"]
        assert {rule["health"] for group in rules["groups"] for rule in group["rules"]} == {"ok"}


def test_start_line_says_what_fits(servers: ServerSwitch, url: str) -> None:
    log = Path(servers.log_path).read_text()
    (line,) = [line for line in log.splitlines() if "KVSpec:" in line and "tokens fit" in line]
    assert "24576 tokens fit" in line
    assert "x, limited by" not in line
    assert "codec uniform4" in line


def test_hooks_log_one_line(servers: ServerSwitch, url: str) -> None:
    log = Path(servers.log_path).read_text()
    (line,) = [line for line in log.splitlines() if "hooks applied" in line]
    release = re.escape(metadata.version("sglang"))
    assert re.search(rf"KVSpec: \d+ hooks applied to SGLang {release} by", line)
    assert "hook(s)" not in log


def test_profile_is_written(url: str, tmp_path: Path) -> None:
    profile = {"output_dir": str(tmp_path), "num_steps": 2, "profile_id": "two"}
    requests.post(f"{url}/start_profile", json=profile, timeout=60).raise_for_status()
    # The answer may be complete before the third iteration.
    generate(url, max_new_tokens=64)
    assert [path.name for path in tmp_path.iterdir()] == ["two-TP-0.trace.json.gz"]


def test_concurrent_requests_are_staggered(servers: ServerSwitch) -> None:
    url = servers.use(KVSPEC_STAGGERED).base_url
    before = report_of(url)["counters"]
    texts = [LONG_PROMPT + f"_{index}" for index in range(6)]
    params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    answers = post(url, "/generate", {"text": texts, "sampling_params": params})
    alone = [generate(url, text, max_new_tokens=60, ignore_eos=True) for text in texts]
    assert [essence(a) for a in answers] == [essence(a) for a in alone]
    after = report_of(url)["counters"]
    assert after["mixed_iterations"] > before["mixed_iterations"]
