"""The requests of one round, as the engine sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvspec.runtime.request_state import RequestState


@dataclass(slots=True)
class RoundBatch:
    """Requests of a round. Request i is states[i].

    pages[i]: page ids [num_pages] int64 on the CPU from position 0 on, up to the last draft of the
    round after this one. handles[i]: the server's own object of request i, for ports only.
    source: the server's own batch, for ModelForward only. wants_logprobs: some request asks for
    log-probabilities. late: requests that cannot verify, because some of their residuals are still
    on the network.
    """

    states: Sequence[RequestState]
    pages: Sequence[torch.Tensor]
    handles: Sequence[Any]
    source: Any = None
    wants_logprobs: bool = False
    late: frozenset[int] = frozenset()

    @property
    def is_greedy(self) -> bool:
        """Return True if all requests are greedy, so that the device alone can choose tokens."""
        return all(state.is_greedy for state in self.states)
