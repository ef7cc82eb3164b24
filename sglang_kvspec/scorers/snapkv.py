"""SnapKV: attention of a prompt's last queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from sglang_kvspec.scorers.attention import attention_mass
from sglang_kvspec.scorers.base import ALWAYS, About, Allocation, LayerChunk, Needs
from sglang_kvspec.scorers.options import require


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Scorer by the attention of a prompt's last queries, pooled over neighbours.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation",
    arXiv 2404.14469, section 4. The paper scores query heads; here the mean over the query heads of
    a KV head counts, as one KV head is read for all of them.

    window: last tokens whose queries count. Drafts always read these tokens. kernel: positions of
    the average pooling. Behind a cached prefix the window has only tokens that were computed.
    """

    about: ClassVar[About] = About(
        "SnapKV (Li et al., arXiv 2404.14469, section 4)",
        "tokens that a prompt's last queries attend to, and their neighbours",
        "attention of the last queries, once a chunk",
    )
    needs: ClassVar[Needs] = Needs(earlier=False)
    allocation: ClassVar[Allocation] = "head"

    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        require(self.window >= 1, "snapkv", "window", self.window, "1 or more")
        is_odd = self.kernel >= 1 and self.kernel % 2 == 1
        require(is_odd, "snapkv", "kernel", self.kernel, "an odd number of positions")

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        before = chunk.memory.get("queries", chunk.queries[:0])
        newest = torch.cat((before, chunk.queries[-self.window :]))[-self.window :]
        # A view would hold more queries than the window in memory.
        chunk.memory["queries"] = newest.clone()
        num_scored = chunk.end - len(newest)
        size = (chunk.keys.shape[1], chunk.end)
        scores = chunk.keys.new_full(size, ALWAYS, dtype=torch.float32)
        if num_scored:
            mass = attention_mass(newest, chunk.keys, chunk.scale)[:, :num_scored] / len(newest)
            scores[:, :num_scored] = functional.avg_pool1d(
                mass, self.kernel, stride=1, padding=self.kernel // 2
            )
        return scores
