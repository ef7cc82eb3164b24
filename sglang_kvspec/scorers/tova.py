"""TOVA: attention of the newest query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_kvspec.scorers.attention import attention_mass
from sglang_kvspec.scorers.base import About, Allocation, LayerChunk, Needs


@dataclass(frozen=True, slots=True)
class TOVA:
    """Scorer by the attention of the newest query, the same for all KV heads of a layer.

    Source: Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104, section 3. The paper
    drops one token a step for good; here all tokens are ranked anew after each verification. The
    mean is over the query heads of a rank, which sees no others, so ranks may read different
    tokens.
    """

    about: ClassVar[About] = About(
        "TOVA (Oren et al., arXiv 2401.06104, section 3)",
        "tokens that the newest query attends to",
        "attention of one query, after each chunk and each verification",
    )
    needs: ClassVar[Needs] = Needs(earlier=False, drafting=True)
    allocation: ClassVar[Allocation] = "head"

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        mass = attention_mass(chunk.queries[-1:], chunk.keys, chunk.scale)
        return mass.mean(0).repeat(len(mass), 1)
