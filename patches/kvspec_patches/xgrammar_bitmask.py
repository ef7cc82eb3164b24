"""_allocate_token_bitmask: allocates without pinning. Pinning needs a GPU driver."""

from __future__ import annotations

import torch


def hook(vocab_size: int, batch_size: int) -> torch.Tensor:
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)
