"""A decoder of a few thousand weights, with SGLang's interface of a model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

VOCABULARY, LAYERS, HEADS, KV_HEADS, SIZE = 50, 2, 4, 2, 8


class SmallDecoder(torch.nn.Module):
    """Layers of attention over embeddings of tokens and positions, in fp32."""

    def __init__(self, attn_backend: Callable[[], Any]) -> None:
        """attn_backend: returns the attention backend that is in force."""
        super().__init__()
        self._attn_backend = attn_backend
        width = HEADS * SIZE
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.places = torch.nn.Embedding(64, width)
        self.qkv = torch.nn.ModuleList(
            torch.nn.Linear(width, (HEADS + 2 * KV_HEADS) * SIZE) for _ in range(LAYERS)
        )
        self.head = torch.nn.Linear(width, VOCABULARY)
        self._layers = [
            SimpleNamespace(
                layer_id=i, tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, scaling=SIZE**-0.5
            )
            for i in range(LAYERS)
        ]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        x = self.tokens(input_ids) + self.places(positions)
        for qkv, layer in zip(self.qkv, self._layers, strict=True):
            q, k, v = qkv(x).split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=-1)
            x = x + self._attn_backend().forward(q, k, v, layer, batch)
        return SimpleNamespace(next_token_logits=self.head(x))
