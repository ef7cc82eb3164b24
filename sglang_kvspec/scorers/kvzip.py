"""KVzip: attention of the model while it repeats the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from sglang_kvspec.scorers.attention import attention_blocks
from sglang_kvspec.scorers.base import ALWAYS, About, Allocation, LayerChunk, Needs


@dataclass(frozen=True, slots=True)
class KVzip:
    """Scorer by the largest attention that a token receives while the model repeats the prompt.

    Source: Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
    arXiv 2505.23416, section 3. The maximum is over all queries of the repeats and over the query
    heads of a KV head. The paper normalises attention over the part of the prompt that is repeated
    and over the repeat; here all tokens that a query sees count, as in the model's own attention.
    Until a repeat, drafts read all tokens. The keys of a cached prefix are scored like all others.
    """

    about: ClassVar[About] = About(
        "KVzip (Kim et al., arXiv 2505.23416, section 3)",
        "tokens that the model attends to while it repeats the prompt",
        "a second prefill of the prompt, and attention of its queries",
    )
    needs: ClassVar[Needs] = Needs(repeats=True)
    # KVzip drops what lies below one threshold, so heads and layers that repeat little keep little.
    # With `head`, each of them would keep its best tokens, however low these score beside others.
    # The layers and heads of a rank share one budget; ranks do not share theirs.
    allocation: ClassVar[Allocation] = "model"

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        scores = functional.pad(chunk.scores, (0, len(chunk.queries)), value=ALWAYS)
        if chunk.start < chunk.prompt_len:
            return scores
        former = scores[:, : chunk.prompt_len]
        best = former.masked_fill(former == ALWAYS, 0.0)
        for block in attention_blocks(chunk.queries, chunk.keys, chunk.scale):
            best = torch.maximum(best, block[..., : chunk.prompt_len].amax((1, 2)))
        scores[:, : chunk.prompt_len] = best
        return scores
