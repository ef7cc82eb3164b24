"""Everything a user of SGLang does gives the same answer with --kvspec as without."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import requests
from harness.features import CASES, LONG_PROMPT, essence, events, generate, post
from harness.models import DEMO_MODEL
from harness.servers import ServerSpec, ServerSwitch

pytestmark = pytest.mark.server

_CHAT_TEMPLATE = Path(__file__).parent / "harness" / "chat.jinja"
_SHARED = (
    "--max-total-tokens=24576",
    "--enable-metrics",
    "--grammar-backend=xgrammar",
    f"--chat-template={_CHAT_TEMPLATE}",
    "--enable-return-hidden-states",
    "--enable-custom-logit-processor",
)
PLAIN = ServerSpec(DEMO_MODEL, _SHARED)
# A residual cache far smaller than the prompts makes fetches, evictions and streamed reads happen.
KVSPEC = ServerSpec(DEMO_MODEL, (*_SHARED, "--kvspec", "--kvspec-residual-hbm-fraction=0.05"))

KVSPEC_ROUNDS = ServerSpec(DEMO_MODEL, (*KVSPEC.arguments, "--kvspec-schedule=rounds"))

# Emitted from logits that differ in the last bits: forward passes batch tokens differently.
LOGPROB_TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def expected(servers: ServerSwitch) -> dict[str, Any]:
    """Answers of plain SGLang to every case, or the error it gives."""
    client = servers.use(PLAIN)
    return {name: _run(run, client.base_url) for name, run in CASES.items()}


@pytest.fixture(scope="module")
def url(servers: ServerSwitch, expected: dict[str, Any]) -> str:
    return servers.use(KVSPEC).base_url


def _run(run: Any, base_url: str) -> Any:
    return json.loads(json.dumps(run(base_url)))


@pytest.mark.parametrize("name", CASES)
def test_same_as_plain(name: str, url: str, expected: dict[str, Any]) -> None:
    assert_same(_run(CASES[name], url), expected[name], name)


@pytest.mark.identity
def test_all_cases_in_rounds(servers: ServerSwitch, expected: dict[str, Any]) -> None:
    url = servers.use(KVSPEC_ROUNDS).base_url
    for name, run in CASES.items():
        assert_same(_run(run, url), expected[name], name)


def assert_same(actual: Any, wanted: Any, where: str) -> None:
    """Equal structure and values; floats within LOGPROB_TOLERANCE."""
    if isinstance(wanted, dict):
        assert actual.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_same(actual[key], value, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(actual) == len(wanted), where
        for index, value in enumerate(wanted):
            assert_same(actual[index], value, f"{where}[{index}]")
    elif isinstance(wanted, float):
        assert actual == pytest.approx(wanted, abs=LOGPROB_TOLERANCE), where
    else:
        assert actual == wanted, where


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


def test_seeds_repeat_and_differ(url: str) -> None:
    def sample(seed: int) -> list[int]:
        return generate(url, temperature=0.9, sampling_seed=seed, max_new_tokens=48)["output_ids"]

    alone = [sample(seed) for seed in (1, 2)]
    together: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda s=seed: together.update({s: sample(s)}))
        for seed in (1, 2, 3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone == [together[1], together[2]], "a seed must not depend on what runs beside it"
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
    report = _kvspec(url)
    absent = report["page_states"].pop("ABSENT")
    assert absent == report["pools"]["num_pages"] + 1
    assert report["pools"]["window_pages_used"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("return_hidden_states", True), ("custom_logit_processor", '{"callable": "00"}')],
)
def test_refuses_what_it_cannot_serve(url: str, field: str, value: Any) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 4}, field: value}
    reply = requests.post(f"{url}/generate", json=body, timeout=60)
    assert reply.status_code == 400
    assert "--kvspec" in reply.text
    assert field.split("_")[-1] in reply.text.replace(" ", "_")


def test_server_info_and_metrics(url: str) -> None:
    generate(url, max_new_tokens=60, ignore_eos=True)
    report = _kvspec(url)
    assert report["config"]["codec"] == "log4"
    assert report["pools"]["kv_bytes_allocated"] >= report["pools"]["kv_bytes"]
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


def test_start_line_says_what_fits(servers: ServerSwitch, url: str) -> None:
    log = Path(servers.log_path).read_text()
    (line,) = [line for line in log.splitlines() if "KVSpec:" in line and "tokens fit" in line]
    assert "24576 tokens fit" in line
    assert "codec log4" in line


def test_profile_is_written(url: str, tmp_path: Path) -> None:
    profile = {"output_dir": str(tmp_path), "num_steps": 2, "profile_id": "two"}
    requests.post(f"{url}/start_profile", json=profile, timeout=60).raise_for_status()
    # Complete before the third iteration.
    generate(url, max_new_tokens=64)
    assert [path.name for path in tmp_path.iterdir()] == ["two-TP-0.trace.json.gz"]


def test_concurrent_requests_are_staggered(url: str) -> None:
    before = _kvspec(url)["counters"]
    texts = [LONG_PROMPT + f"_{index}" for index in range(6)]
    params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    answers = post(url, "/generate", {"text": texts, "sampling_params": params})
    alone = [generate(url, text, max_new_tokens=60, ignore_eos=True) for text in texts]
    assert [essence(a) for a in answers] == [essence(a) for a in alone]
    after = _kvspec(url)["counters"]
    assert after["mixed_iterations"] > before["mixed_iterations"]


def _kvspec(url: str) -> dict[str, Any]:
    info = requests.get(f"{url}/server_info", timeout=60).json()
    return info["internal_states"][0]["kvspec"]
