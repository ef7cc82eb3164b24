"""A draft view of another package in which layers and KV heads read different pages: the first
page, and two successive pages, which end at the newest page or one before it."""

from __future__ import annotations

from typing import ClassVar

import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.draft_view import ViewShape
from sglang_kvspec.runtime.request_state import RequestState

SINKS, RECENT = 1, 2


class SinksAndRecentByHead:
    per_head: ClassVar[bool] = True
    num_queries: ClassVar[int] = 0

    def __init__(self, config: KVSpecConfig, shape: ViewShape) -> None:
        layers = torch.arange(shape.num_layers)[:, None]
        heads = torch.arange(shape.first_kv_head, shape.first_kv_head + shape.num_kv_heads)
        self._lags = (layers + heads) % 2

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        if num_pages <= SINKS + RECENT:
            return None
        recent = torch.arange(num_pages - RECENT, num_pages) - self._lags[..., None]
        sinks = torch.arange(SINKS).expand(*self._lags.shape, -1)
        return torch.cat((sinks, recent), dim=-1)
