"""_allocate_token_bitmask: pinned memory needs a GPU driver; on a CPU nothing needs it."""

from __future__ import annotations

import torch


def hook(vocab_size: int, batch_size: int) -> torch.Tensor:
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)
