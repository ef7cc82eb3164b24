"""H2O: attention of all queries so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from sglang_kvspec.scorers.attention import attention_mass
from sglang_kvspec.scorers.base import About, Allocation, LayerChunk, Needs


@dataclass(frozen=True, slots=True)
class H2O:
    """Scorer by the attention that a token has received from all queries so far.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
    Language Models", arXiv 2306.14048, section 4. Three things differ from the paper. Its queries
    see the tokens that are left; here queries see all tokens, and a token that was not read may
    come back. The paper gives half of the budget to the newest tokens; here no share is set aside,
    as drafts on a GPU read the recent window in any case. The mean over the query heads of a KV
    head counts. A cached prefix, whose attention is unknown, is read in any case.
    """

    about: ClassVar[About] = About(
        "H2O (Zhang et al., arXiv 2306.14048, section 4)",
        "tokens that received most attention so far",
        "attention of all queries a second time, of the prompt and of each verification",
    )
    needs: ClassVar[Needs] = Needs(drafting=True)
    allocation: ClassVar[Allocation] = "head"

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        # ALWAYS plus mass stays ALWAYS.
        former = functional.pad(chunk.scores, (0, len(chunk.queries)))
        return former + attention_mass(chunk.queries, chunk.keys, chunk.scale)
