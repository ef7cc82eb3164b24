"""Drafts in the usage of OpenAI answers, from SGLang's models to JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.entrypoints.openai.usage_processor import UsageProcessor

from kvspec_patches import response_usage, spec_meta_info, streaming_usage
from sglang_kvspec.adapters import activation

COUNTS = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 6}
# Since 0.5.23 SGLang itself counts reasoning tokens there.
HAS_DETAILS = hasattr(protocol, "CompletionTokensDetails")


@pytest.fixture
def answers(monkeypatch):
    """Three answers of (tokens, drafted, accepted), as the tokenizer process finishes them."""
    monkeypatch.setattr(activation, "config_of", lambda server_args: object())
    finished = [(9, 8, 5), (4, 5, 2), (1, 0, 0)]
    received = SimpleNamespace(
        rids=["a", "b", "c"],
        completion_tokens=[tokens for tokens, _, _ in finished],
        cached_tokens_details=None,
        spec_verify_ct=[3, 2, 0],
        spec_num_cap_tokens=[drafted for _, drafted, _ in finished],
        spec_num_correct_drafts=[accepted for _, _, accepted in finished],
        spec_correct_drafts_histogram=[[], [], []],
    )
    manager = SimpleNamespace(server_args=None, rid_to_state={})
    made = []
    for i, (tokens, _, _) in enumerate(finished):
        meta_info = {"prompt_tokens": 10, "completion_tokens": tokens, "reasoning_tokens": 0}
        spec_meta_info.hook(None, manager, meta_info, received, i)
        made.append({"meta_info": meta_info})
    return made


def streamed(answers):
    def by_index(name):
        return {i: answer["meta_info"][name] for i, answer in enumerate(answers)}

    counts = [by_index(f"{name}_tokens") for name in ("prompt", "reasoning", "completion")]
    usage = UsageProcessor.calculate_streaming_usage(*counts, {}, n_choices=3)
    streaming_usage.hook(usage, *counts, cached_tokens={}, n_choices=3)
    return usage


def whole(answers):
    usage = UsageProcessor.calculate_response_usage(answers, n_choices=3)
    response_usage.hook(usage, answers, n_choices=3)
    return usage


@pytest.mark.parametrize("make", [whole, streamed])
@pytest.mark.parametrize(
    "model",
    [
        protocol.CompletionResponse,
        protocol.CompletionStreamResponse,
        protocol.ChatCompletionResponse,
        protocol.ChatCompletionStreamResponse,
    ],
)
def test_drafts_of_all_samples_reach_the_json(answers, make, model):
    answer = model(id="x", created=1, model="m", choices=[], usage=make(answers))
    usage = json.loads(answer.model_dump_json(exclude_none=True))["usage"]
    reasoning = {"reasoning_tokens": 0} if HAS_DETAILS else {}
    assert usage["completion_tokens_details"] == reasoning | COUNTS
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 14)


@pytest.mark.skipif(not HAS_DETAILS, reason="SGLang has no details of its own")
def test_reasoning_tokens_stay(answers):
    answers[1]["meta_info"]["reasoning_tokens"] = 3
    details = {"reasoning_tokens": 3}
    without = {"meta_info": {"completion_tokens": 5, "reasoning_tokens": 3}}
    for responses, counts in ((answers, COUNTS), ([without], {})):
        usage = UsageProcessor.calculate_response_usage(responses)
        response_usage.hook(usage, responses)
        dumped = json.loads(usage.model_dump_json())
        assert dumped["completion_tokens_details"] == details | counts


def test_counted_tokens_are_plain_json(answers):
    meta_info = answers[0]["meta_info"]
    assert json.loads(json.dumps(meta_info))["completion_tokens"] == 9


def test_answers_without_counts_stay_as_they_are():
    responses = [{"meta_info": {"completion_tokens": 3}}]
    usage = UsageProcessor.calculate_response_usage(responses)
    before = usage.model_dump(exclude_none=True)
    response_usage.hook(usage, responses)
    assert usage.model_dump(exclude_none=True) == before
