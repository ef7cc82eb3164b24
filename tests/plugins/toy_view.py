"""A draft view of another package: the first page, which draws much attention with any text, and
the newest pages."""

from __future__ import annotations

from typing import ClassVar

import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.draft_view import ViewShape
from sglang_kvspec.runtime.request_state import RequestState

SINKS, RECENT = 1, 2


class SinksAndRecent:
    per_head: ClassVar[bool] = False
    num_queries: ClassVar[int] = 0

    def __init__(self, config: KVSpecConfig, shape: ViewShape) -> None:
        pass

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        if num_pages <= SINKS + RECENT:
            return None
        return torch.cat((torch.arange(SINKS), torch.arange(num_pages - RECENT, num_pages)))
