"""Accept rules: the drafts that the target keeps, and the one token that it adds.

Rows: a verification of n drafts has n + 1 target rows; row j is the target after the pending token
and the first j drafts. sampling.py decides what the target is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def accept_matching(drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Return target tokens up to and including the first that differs from its draft.

    targets: n + 1 tokens that the target chose for n drafts, each given the drafts before it. For
    greedy decoding, and for sampling with noise fixed by seed and position, these are exactly the
    tokens that plain decoding would have chosen.
    """
    assert len(targets) == len(drafts) + 1
    emitted = []
    for draft, target in zip([*drafts, None], targets, strict=True):
        emitted.append(target)
        if draft != target:
            break
    return emitted


def accept_by_rejection(
    drafts: Sequence[int],
    draft_probs: Sequence[torch.Tensor],
    target_probs: torch.Tensor,
    generator: torch.Generator,
) -> list[int]:
    """Accept drafts by speculative rejection sampling (Leviathan et al. 2023, algorithm 1; Lynx
    section 4.3).

    draft_probs: n distributions [vocab] that the drafts were drawn from. target_probs: [n + 1,
    vocab]. Returns between 1 and n + 1 tokens, whose joint distribution is the target's for any
    draft distributions.
    """
    emitted: list[int] = []
    for index, (token, q) in enumerate(zip(drafts, draft_probs, strict=True)):
        p = target_probs[index]
        threshold = torch.rand((), generator=generator, dtype=torch.float64, device=p.device)
        # u < p / q without the division: q[token] > 0, since the token was drawn from q.
        if float(threshold) * float(q[token]) < float(p[token]):
            emitted.append(token)
            continue
        residual = (p - q).clamp_(min=0)
        # p == q everywhere up to rounding. Rejecting had probability ~0, and any draw from p is
        # right.
        weights = residual if float(residual.sum()) > 0 else p
        emitted.append(draw(weights, generator))
        return emitted
    emitted.append(draw(target_probs[len(drafts)], generator))
    return emitted


def draw(weights: torch.Tensor, generator: torch.Generator) -> int:
    """Draw one index in proportion to weights [vocab], which need not be normalised."""
    return int(torch.multinomial(weights, 1, generator=generator))
