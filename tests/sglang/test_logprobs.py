"""Shapes of log-probabilities: SGLang reads them differently after a prefill and a decode."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_kvspec.adapters.logprobs import fill_logprobs
from sglang_kvspec.runtime.chooser import Verified
from sglang_kvspec.runtime.sampling import SamplingParams

BATCH = SimpleNamespace(top_logprobs_nums=[2, 0], token_ids_logprobs=[None, [3, 1]])
LOGITS = torch.arange(8.0).reshape(2, 4)


def filled(stride: int | None, *tokens: list[int] | None) -> LogitsProcessorOutput:
    output = LogitsProcessorOutput(next_token_logits=None)
    entries = [None if emitted is None else Verified(emitted, LOGITS) for emitted in tokens]
    fill_logprobs(output, BATCH, entries, [SamplingParams()] * len(entries), stride)
    return output


def test_prefill_has_one_number_a_request() -> None:
    output = filled(None, [3], [0])
    expected = torch.log_softmax(LOGITS[:1], dim=-1)[0]
    assert output.next_token_logprobs.tolist() == pytest.approx(
        [float(expected[3]), float(expected[0])]
    )


# A stride of 1 is what --kvspec-draft-len 0 gives.
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
