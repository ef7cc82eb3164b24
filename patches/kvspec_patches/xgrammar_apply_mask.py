"""XGrammarGrammar.apply_vocab_mask: SGLang knows only device kernels; xgrammar has one for CPUs.

SGLang 0.5.17. Remove when SGLang accepts logits in host memory here.
"""

from __future__ import annotations

from typing import Any

import torch

TARGET = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask"
KIND = "replace"
SCOPE = "cpu"


def hook(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)
