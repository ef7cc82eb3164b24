"""The two objects that SGLang carries for a speculative algorithm."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvspec.adapters.compat.speculative import SpecInput, SpecInputType
from sglang_kvspec.runtime.request_state import RequestState


class KVSpecDraftInput(SpecInput):  # type: ignore[misc]
    """States of requests between iterations. SGLang filters and merges them with their batch."""

    # SGLang's relay reads these of every draft input; a self-speculating worker has none of them.
    topk_p = topk_index = hidden_states = None
    future_indices: torch.Tensor | None = None
    num_tokens_per_req = 1
    num_tokens_for_logprob_per_req = 1

    def __init__(self, states: list[RequestState]) -> None:
        # The closed enum has no member for plugins; only "is a draft input" matters.
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.states = states

    @property
    def bonus_tokens(self) -> torch.Tensor:
        """Return the pending token of each request: [batch_size] int64."""
        return torch.tensor([state.pending for state in self.states], dtype=torch.int64)

    def filter_batch(self, new_indices: Any, new_indices_cpu: Any = None, **unused: Any) -> None:
        """Keep the states of new_indices: [num_kept] int64, on the device of the batch.

        new_indices_cpu: the same on the CPU. unused: until 0.5.16, has_been_filtered=False.
        """
        on_cpu = new_indices if new_indices_cpu is None else new_indices_cpu
        self.states = [self.states[int(i)] for i in on_cpu]
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]

    def merge_batch(self, other: KVSpecDraftInput) -> None:
        self.states = self.states + other.states
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])


class RaggedForwardInput(SpecInput):  # type: ignore[misc]
    """spec_info of one ragged forward: positions [num_tokens] int64. The attention backend has the
    rows."""

    # Tokens that the forward reads beyond seq_lens, which SGLang asks for since 0.5.22.
    draft_token_num = 0

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
