"""A draft view of another package: the first page, which draws much attention whatever the text
says, and the newest ones."""

from __future__ import annotations

import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.request_state import RequestState

SINKS, RECENT = 1, 2


class SinksAndRecent:
    def __init__(self, config: KVSpecConfig) -> None:
        pass

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        if num_pages <= SINKS + RECENT:
            return None
        return torch.cat((torch.arange(SINKS), torch.arange(num_pages - RECENT, num_pages)))
