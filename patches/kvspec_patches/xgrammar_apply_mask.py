"""XGrammarGrammar.apply_vocab_mask: uses xgrammar's CPU kernel; SGLang only uses device kernels."""

from __future__ import annotations

from typing import Any

import torch


def hook(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)
