"""Observers of forwards at the target precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sglang_kvspec.kv.forward_plan import Row

KV = tuple[torch.Tensor, torch.Tensor]


class LayerObserver(Protocol):
    """Observer of forwards at the target precision, layer by layer."""

    def begin(self, rows: Sequence[Row]) -> None:
        """A forward over these rows begins."""

    def observe(
        self, layer: int, index: int, q: torch.Tensor, context: Callable[[], KV], scale: float
    ) -> None:
        """Row `index` attends in a layer. q: [length, num_heads, head_dim]. context: returns (k, v)
        [row.end, num_kv_heads, head_dim], all tokens up to the row's last. To be called now, if at
        all. Raises torch.OutOfMemoryError where a GPU has no room. A GPU shows PREFILL rows only,
        and earlier tokens as drafts read them."""

    def end(self) -> None:
        """The forward is over."""
