"""xgrammar's bitmask allocation: pinned memory needs a GPU driver, a CPU has nothing to pin for.

SGLang 0.5.17. Remove when SGLang asks the platform whether memory can be pinned.
"""

from __future__ import annotations

import torch

TARGET = "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask"
KIND = "replace"
SCOPE = "cpu"


def hook(vocab_size: int, batch_size: int) -> torch.Tensor:
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)
