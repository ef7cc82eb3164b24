"""How sure greedy drafts were, as two digits a draft in result files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

# A value v is written as the whole number next to STEPS * (v - LOWEST), from 0 to 99.
LOWEST, STEPS = -3.0, 8.0
MOST = 99


def log_odds_and_lead(logits: torch.Tensor) -> torch.Tensor:
    """Return for logits [batch, vocab] the log-odds of the largest, and its lead over the second in
    nats [batch, 2]."""
    logs = logits.log_softmax(-1)
    first, second = logs.topk(2, dim=-1).values.unbind(-1)
    # The sum of all others is exact where 1 - p would be rounded to 0.
    others = logs.scatter(-1, logs.argmax(-1, keepdim=True), float("-inf")).logsumexp(-1)
    return torch.stack((first - others, first - second), dim=-1)


def write_digits(values: Iterable[float]) -> str:
    return "".join(f"{min(max(round(STEPS * (v - LOWEST)), 0), MOST):02}" for v in values)


def read_digits(digits: str) -> Sequence[int]:
    """Return the whole numbers of write_digits(), which order drafts like the values."""
    return [int(digits[i : i + 2]) for i in range(0, len(digits), 2)]
