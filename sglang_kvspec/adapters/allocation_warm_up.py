"""Compilation of SGLang's slot allocation kernels at the start of a server.

SGLang compiles them for every power of two of requests, at the first batch of that size.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvspec.adapters.compat.allocation import assign_req_to_token_pool_func, get_last_loc


def warm_up_allocation(allocator: Any, req_to_token: torch.Tensor, max_requests: int) -> None:
    """Allocate no slots for every power of two of requests, up to the first that is at least
    max_requests. Lengths are int64, as in prefills, and int32, as in speculative decoding. Changes
    no slot."""
    num_requests = 1
    while True:
        rows = torch.zeros(num_requests, dtype=torch.int64, device=req_to_token.device)
        for dtype in (torch.int64, torch.int32):
            lens = rows.to(dtype)
            on_cpu = lens.cpu()
            last_loc = get_last_loc(req_to_token, rows, lens)
            slots = allocator.alloc_extend(lens, on_cpu, lens, on_cpu, last_loc, 0)
            assert slots is not None, "an allocation of no slots must succeed"
            if dtype is torch.int32:
                assign_req_to_token_pool_func(rows, req_to_token, lens, lens, slots, num_requests)
        if num_requests >= max_requests:
            return
        num_requests *= 2
