"""The draft input follows its batch, as every SGLang filters it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_kvspec.adapters.spec_inputs import KVSpecDraftInput


@pytest.mark.parametrize("more", [{"has_been_filtered": False}, {}], ids=["0.5.16", "0.5.17"])
def test_any_requests_stay_in_their_new_order(more: dict[str, Any]) -> None:
    draft_input = KVSpecDraftInput(["first", "second", "third"])
    draft_input.future_indices = torch.tensor([7, 8, 9])
    kept = torch.tensor([2, 0])
    draft_input.filter_batch(new_indices=kept, new_indices_cpu=[2, 0], **more)
    assert draft_input.states == ["third", "first"]
    assert draft_input.future_indices.tolist() == [9, 7]
