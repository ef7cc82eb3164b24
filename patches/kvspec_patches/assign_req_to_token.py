"""assign_req_to_token_pool_func: writes new slots into req_to_token with torch, not Triton."""

from __future__ import annotations

import torch


def hook(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for req_pool_idx, start, end in rows:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[req_pool_idx, start:end] = slots.to(req_to_token.dtype)
        taken += end - start
