"""Write the newest tokens of a forward into the recent window."""

from __future__ import annotations

import torch

from kvspec_kernels.jit.append import append_kernel
from kvspec_kernels.ops import encoding


def append(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    window_k: torch.Tensor,
    window_v: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write row b's token to (slots[b], offsets[b]) of the window, in place. Does not wait for the
    device, and allocates nothing.

    k_new, v_new: [B, H, D], equal strides, the last dimension contiguous.
    window_k, window_v: [W, P, H, D] of the same dtype, written; see `encode_pages` for strides.
    slots, offsets: [B] int32 or int64. A row with slot -1 has no token: nothing is written.
    Raises ValueError for tensors that do not fit. Indices are not checked on the device.
    """
    encoding.check_pages(window_k, window_v, "window_k and window_v")
    encoding.check_tokens(k_new, v_new, window_k)
    encoding.check_indices(len(k_new), slots=slots, offsets=offsets)
    encoding.check_devices(window_k.device, slots=slots, offsets=offsets)
    num_heads, head_dim = window_k.shape[2:]
    if len(k_new) == 0 or num_heads == 0:
        return
    new_pairs, window_pairs = encoding.pairs(k_new), encoding.pairs(window_k)
    append_kernel[(len(k_new) * 2 * num_heads,)](
        k_new_ptr=new_pairs,
        v_new_ptr=encoding.pairs(v_new),
        window_k_ptr=window_pairs,
        window_v_ptr=encoding.pairs(window_v),
        slots_ptr=slots,
        offsets_ptr=offsets,
        num_heads=num_heads,
        stride_new=new_pairs.stride(0),
        stride_new_head=new_pairs.stride(1),
        stride_page=window_pairs.stride(0),
        stride_token=window_pairs.stride(1),
        stride_head=window_pairs.stride(2),
        HEAD_DIM=head_dim,
        num_warps=1,
    )
