"""Grammar masks: the tokens that a request's grammar allows, along a chain of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Masks along a chain of drafts. allowed: [num_drafts + 1, vocab] bool, row j after the first j
    drafts. max_tokens: most tokens that may be emitted before the grammar ends."""

    allowed: torch.Tensor
    max_tokens: int


def masks_along(grammar: Any, drafts: Sequence[int], logits: torch.Tensor) -> GrammarMasks | None:
    """Return masks for logits [num_drafts + 1, vocab]; None if nothing is constrained.

    The grammar's state is restored. Rows after a draft that the grammar does not allow stay
    unconstrained. They are never reached: the row before gives that draft probability 0.
    """
    if grammar is None or grammar.finished or grammar.is_terminated():
        return None
    bitmask = grammar.allocate_vocab_mask(logits.shape[-1], len(logits), logits.device)
    grammar.fill_vocab_mask(bitmask, 0)
    max_tokens = len(drafts) + 1
    num_accepted = 0
    for token in drafts:
        try:
            grammar.accept_token(token)
        except ValueError:
            break
        num_accepted += 1
        if grammar.is_terminated():
            max_tokens = num_accepted
            break
        grammar.fill_vocab_mask(bitmask, num_accepted)
    if num_accepted:
        grammar.rollback(num_accepted)
    marked = torch.zeros_like(logits, dtype=torch.float32)
    bitmask = grammar.move_vocab_mask(bitmask, logits.device)
    grammar.apply_vocab_mask(marked, bitmask)
    return GrammarMasks(marked == 0, max_tokens)


def allowed_by(masks: GrammarMasks | None) -> torch.Tensor | None:
    """Return the masks' `allowed`; None if nothing is constrained."""
    return None if masks is None else masks.allowed


def mask_after(grammar: Any, drafts: Sequence[int], logits: torch.Tensor) -> torch.Tensor | None:
    """Return the tokens that the grammar allows after all drafts: [1, vocab] bool, like logits;
    None for all tokens."""
    if grammar is None:
        return None
    masks = masks_along(grammar, drafts, logits.expand(len(drafts) + 1, -1))
    return None if masks is None else masks.allowed[-1:]
