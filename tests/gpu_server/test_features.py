"""Every use of SGLang gives the same answer with drafting as without."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import Fleet
from harness.feature_answers import answer_to, assert_same
from harness.features import CASES, LONG_PROMPT, events, post
from live_server import LiveServer

# Sampling parameters. Those that are not given have their defaults.
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "high temperature": {"temperature": 1.5},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    "all filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "regex": {"regex": r"[a-f]{3,12}-[0-9]{2,40}(, (yes|no)){2,9}"},
}


@pytest.mark.servers("pages")
@pytest.mark.parametrize("name", CASES)
def test_same_as_without_drafts(name: str, server: LiveServer, fleet: Fleet) -> None:
    wanted = answer_to(name, fleet["off"].base_url)
    assert_same(answer_to(name, server.base_url), wanted, name)


@pytest.mark.servers("pages")
@pytest.mark.parametrize("name", SAMPLED)
def test_a_seed_gives_the_same_text(
    name: str, server: LiveServer, fleet: Fleet, prompts: list[list[int]], new_tokens: int
) -> None:
    bodies = [
        {
            "input_ids": prompt,
            "sampling_params": {
                **{"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True},
                **SAMPLED[name],
                "sampling_seed": seed,
            },
        }
        for seed, prompt in enumerate(prompts[:6])
    ]
    found, wanted = (
        [answer["output_ids"] for answer in one.send(bodies)] for one in (server, fleet["off"])
    )
    assert found == wanted


@pytest.mark.servers("pages")
def test_an_abort_ends_a_stream(server: LiveServer) -> None:
    body = {
        "text": LONG_PROMPT,
        "rid": "to-be-aborted",
        "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True},
    }
    last: dict[str, Any] = {}
    for number, chunk in enumerate(events(server.base_url, "/generate", body)):
        if number == 2:
            post(server.base_url, "/abort_request", {"rid": "to-be-aborted"})
        last = chunk
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] < 4000
