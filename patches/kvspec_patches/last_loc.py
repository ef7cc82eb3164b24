"""get_last_loc: takes the torch path, which SGLang chooses by backend name.

SGLang 0.5.17. Remove when SGLang asks the platform instead of a list of names.
"""

from __future__ import annotations

import torch

TARGET = "sglang.srt.mem_cache.allocation.get_last_loc"
KIND = "replace"
SCOPE = "cpu_kvspec"


def hook(
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
