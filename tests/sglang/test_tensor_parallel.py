"""Two ranks give the answers of one rank, and use the decisions of rank 0.

On the other rank a fault changes each choice: tokens, acceptance and draft lengths. Answers are
therefore right only if rank 0's choices replace the other rank's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from harness.faults import fault_environment, fault_file_in
from harness.feature_answers import KVSPEC, SEEDS, answer_to, assert_same, report_of, sample
from harness.features import CASES, LONG_PROMPT, post
from harness.scenarios import STRICT_CHECKS
from harness.servers import ServerSpec, ServerSwitch

from sglang_kvspec.adapters.attention import check_logits
from sglang_kvspec.adapters.compat import processors
from sglang_kvspec.adapters.ranks import ranks_on_a_machine, ranks_on_a_numa_node
from sglang_kvspec.core.errors import UnsupportedError

pytestmark = pytest.mark.server

Url = Callable[[str], str]

# Requests side by side, grammars, penalties, log-probabilities and prefixes. `make identity` runs
# all cases.
SAMPLE = (
    "batch_of_prompts",
    "regex_constraint",
    "logprobs_with_stop_and_penalty",
    "cached_prefix",
)
# Less than the token limit needs. The number of pages follows from each rank's share of this
# memory.
HOST_GB = 0.125
# With this flag ranks agree on each prompt's prefix. test_tiers_of_ranks.py tests the result.
PREFIXES = "--kvspec-prefix-host-gb=0.02"
# Each schedule needs another server.
schedules = pytest.mark.parametrize(
    "schedule", [pytest.param("staggered", marks=pytest.mark.identity), "rounds"]
)


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_file_in(tmp_path_factory.mktemp("faults"), "ranks_differ")


@pytest.fixture(scope="module")
def url_of(servers: ServerSwitch, seeded_answers: dict[int, list[int]], fault_file: Path) -> Url:
    """Return a function that starts the server of a schedule. The answers to compare with are
    computed first."""
    environment = STRICT_CHECKS.environment + fault_environment(KVSPEC_FAULT_FILE=fault_file)

    def use(schedule: str) -> str:
        flags = (f"--kvspec-schedule={schedule}", f"--kvspec-host-gb={HOST_GB}", PREFIXES)
        arguments = (*KVSPEC.arguments, "--tp-size=2", *flags)
        spec = ServerSpec(KVSPEC.model, arguments, environment)
        return servers.use(spec).base_url

    return use


@schedules
def test_two_ranks_answer_like_one(
    schedule: str,
    url_of: Url,
    fault_file: Path,
    plain_answers: dict[str, Any],
    seeded_answers: dict[int, list[int]],
) -> None:
    url = url_of(schedule)
    for name in SAMPLE:
        assert_same(answer_to(name, url), plain_answers[name], name)
    assert {seed: sample(url, seed) for seed in SEEDS} == seeded_answers
    texts = [LONG_PROMPT + f"_{index}" for index in range(3)]
    params = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 24, "ignore_eos": True}
    # Each rank has a random generator of its own, so there is no reference; the ranks must stay in
    # step.
    answers = post(url, "/generate", {"text": texts, "sampling_params": params})
    assert [len(answer["output_ids"]) for answer in answers] == [24] * 3
    assert fault_file.with_suffix(".fired").exists(), "the other rank was right by itself"
    report = report_of(url)
    assert report["ranks"] == 2
    pools = report["pools"]
    assert 2 * pools["bytes_per_token_plain"] == plain_bytes_per_token(KVSPEC.model)
    page_bytes = pools["bytes_per_token_residual"] * pools["page_size"]
    assert pools["limited_by"] == "host memory"
    assert pools["num_pages"] == HOST_GB * 2**30 / 2 // page_bytes
    # The lengths of `auto` drafts follow measured times. On a busy machine there may be too few
    # drafts for a rejection.
    assert 0 < report["counters"]["accepted"] <= report["counters"]["drafted"]
    # If each rank counted, all counts would be doubled.
    counted = re.search(
        r"^sglang:kvspec_verifications_total\{.*\} (\S+)$",
        requests.get(f"{url}/metrics", timeout=60).text,
        re.MULTILINE,
    )
    assert counted is not None
    assert float(counted[1]) == report["counters"]["verifications"]


def test_ranks_draft_with_copies_of_their_weights(
    servers: ServerSwitch, seeded_answers: dict[int, list[int]]
) -> None:
    # Copies take half a minute. A start counts what other servers allocate meanwhile as its own.
    room = "--mem-fraction-static=0.4"
    copies = ("--kvspec-draft-weights=int4", "--kvspec-draft-len=8", room)
    spec = ServerSpec(KVSPEC.model, (*KVSPEC.arguments, "--tp-size=2", *copies))
    url = servers.use(spec).base_url
    assert {seed: sample(url, seed) for seed in SEEDS} == seeded_answers
    counters = report_of(url)["counters"]
    assert 0 < counters["accepted"] <= counters["drafted"]


@pytest.mark.identity
def test_ranks_are_proposed_the_same_tokens(
    servers: ServerSwitch,
    plain_answers: dict[str, Any],
    seeded_answers: dict[int, list[int]],
    fault_file: Path,
) -> None:
    flags = ("--tp-size=2", "--kvspec-drafter=ngram", "--kvspec-ngram-shared=true")
    environment = STRICT_CHECKS.environment + fault_environment(KVSPEC_FAULT_FILE=fault_file)
    spec = ServerSpec(KVSPEC.model, (*KVSPEC.arguments, *flags), environment)
    url = servers.use(spec).base_url
    for name in SAMPLE:
        assert_same(answer_to(name, url), plain_answers[name], name)
    assert {seed: sample(url, seed) for seed in SEEDS} == seeded_answers
    assert report_of(url)["ngram"]["kept"] > 0


def test_ranks_divide_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on two machines of two NUMA nodes each."""
    monkeypatch.setattr(processors, "get_cpu_ids_by_node", lambda: ["0-3", "4-7"])
    for tp_size, on_machine, on_node in ((1, 1, 1), (2, 1, 1), (4, 2, 1), (8, 4, 2), (10, 5, 3)):
        args = SimpleNamespace(tp_size=tp_size, nnodes=2)
        assert (ranks_on_a_machine(args), ranks_on_a_numa_node(args)) == (on_machine, on_node)


def test_ranks_that_compute_all_logits_themselves_are_refused() -> None:
    for num_ranks, gathers in ((1, False), (2, True)):
        check_logits(SimpleNamespace(do_tensor_parallel_all_gather=gathers), num_ranks)
    with pytest.raises(UnsupportedError, match="logits that its 2 ranks do not gather"):
        check_logits(SimpleNamespace(do_tensor_parallel_all_gather=False), 2)


def plain_bytes_per_token(model: Path) -> int:
    """Return the bytes per token of the demo model's KV cache in float32, over all ranks."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


@pytest.mark.identity
@schedules
def test_two_ranks_answer_every_case(
    schedule: str, url_of: Url, plain_answers: dict[str, Any]
) -> None:
    url = url_of(schedule)
    for name in CASES:
        assert_same(answer_to(name, url), plain_answers[name], name)
