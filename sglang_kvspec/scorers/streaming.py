"""StreamingLLM: the first tokens and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_kvspec.scorers.base import ALWAYS, About, Allocation, LayerChunk, Needs
from sglang_kvspec.scorers.options import require


@dataclass(frozen=True, slots=True)
class StreamingLLM:
    """Scorer by recency, with attention sinks.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
    arXiv 2309.17453, section 3.2. The paper numbers the positions of kept tokens anew; drafts read
    keys as the prompt wrote them. sinks: first tokens that drafts always read.
    """

    about: ClassVar[About] = About(
        "StreamingLLM (Xiao et al., arXiv 2309.17453, section 3.2)",
        "the first tokens and the newest",
        "none",
    )
    needs: ClassVar[Needs] = Needs(earlier=False)
    allocation: ClassVar[Allocation] = "head"

    sinks: int = 4

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "streaming", "sinks", self.sinks, "0 or more")

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        keys = chunk.keys
        positions = torch.arange(chunk.end, dtype=torch.float32, device=keys.device)
        scores = positions.repeat(keys.shape[1], 1)
        scores[:, : self.sinks] = ALWAYS
        return scores
