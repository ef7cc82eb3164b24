"""Shapes of log-probabilities: SGLang reads them differently after a prefill and a decode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_kvspec.adapters.logprobs import fill_logprobs
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.spec_sampler import VerifyResult


def make_batch(*lengths: int, **fields: Any) -> SimpleNamespace:
    """Return a batch of requests with these max_new_tokens."""
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(max_new_tokens=n)) for n in lengths]
    defaults = {"top_logprobs_nums": [2, 0], "token_ids_logprobs": [None, [3, 1]]}
    return SimpleNamespace(reqs=reqs, **{**defaults, **fields})


BATCH = make_batch(5, 5)
LOGITS = torch.arange(8.0).reshape(2, 4)


def filled(
    stride: int | None, *tokens: list[int] | None, batch: SimpleNamespace = BATCH
) -> LogitsProcessorOutput:
    output = LogitsProcessorOutput(next_token_logits=None)
    entries = [None if emitted is None else VerifyResult(emitted, LOGITS) for emitted in tokens]
    fill_logprobs(output, batch, entries, [SamplingParams()] * len(entries), stride)
    return output


def test_prefill_has_one_number_a_request() -> None:
    output = filled(None, [3], [0])
    expected = torch.log_softmax(LOGITS[:1], dim=-1)[0]
    assert output.next_token_logprobs.tolist() == pytest.approx(
        [float(expected[3]), float(expected[0])]
    )


# --kvspec-draft-len 0 gives a stride of 1.
@pytest.mark.parametrize("stride", [1, 3])
def test_decode_has_a_row_a_request(stride: int) -> None:
    output = filled(stride, [3], None)
    assert output.next_token_logprobs.shape == (2, stride)
    assert output.next_token_top_logprobs_idx[0].tolist() == [3, 2]
    assert output.next_token_top_logprobs_val[stride].tolist() == []


def test_flat_lists_hold_each_token_of_a_run() -> None:
    output = filled(3, None, [1, 2])
    assert output.next_token_token_ids_logprobs_idx[3:5] == [[3, 1], [3, 1]]
    rows = torch.log_softmax(LOGITS, dim=-1)
    for place, row in zip((3, 4), rows, strict=True):
        values = output.next_token_token_ids_logprobs_val[place]
        assert values.tolist() == pytest.approx([float(row[3]), float(row[1])])
    chosen = [float(rows[0, 1]), float(rows[1, 2]), 0.0]
    assert output.next_token_logprobs[1].tolist() == pytest.approx(chosen)


@pytest.mark.parametrize("stride", [None, 1, 3])
@pytest.mark.parametrize("number", [-1, -3, -(2**31)])
def test_negative_top_logprobs_are_none(stride: int | None, number: int) -> None:
    output = filled(stride, [3], [0], batch=make_batch(5, 5, top_logprobs_nums=[number, 2]))
    assert output.next_token_top_logprobs_idx[0].tolist() == []
    assert output.next_token_top_logprobs_val[0].tolist() == []
    assert output.next_token_top_logprobs_idx[stride or 1].tolist() == [3, 2]
    assert output.next_token_logprobs is not None


def test_requests_for_no_token_get_no_log_probability_of_one() -> None:
    output = filled(None, [3], [0], batch=make_batch(0, 0))
    assert output.next_token_logprobs is None
    assert output.next_token_top_logprobs_idx[0].tolist() == [3, 2]
    assert output.next_token_token_ids_logprobs_idx[1] == [3, 1]


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1)])
def test_a_batch_that_is_asked_for_a_token_has_log_probabilities(lengths: tuple[int, int]) -> None:
    assert filled(None, [3], [0], batch=make_batch(*lengths)).next_token_logprobs is not None


@pytest.mark.parametrize("stride", [None, 3])
def test_a_masked_token_has_a_finite_log_probability(stride: int | None) -> None:
    """Answers are JSON, which has no infinity."""
    logits = torch.tensor([[0.0, -float("inf"), 1.0, -float("inf")]])
    output = LogitsProcessorOutput(next_token_logits=None)
    batch = make_batch(5, top_logprobs_nums=[4], token_ids_logprobs=[[1]])
    fill_logprobs(output, batch, [VerifyResult([2], logits)], [SamplingParams()], stride)
    assert torch.isfinite(output.next_token_top_logprobs_val[0]).all()
    assert torch.isfinite(output.next_token_token_ids_logprobs_val[0]).all()
