"""The newest tokens of a decode step into the recent window, encoding pages in the same launch."""

from __future__ import annotations

import torch

from kvspec_kernels.formats import Target
from kvspec_kernels.jit.append import append_kernel
from kvspec_kernels.ops import encoding
from kvspec_kernels.ops.encoding import Settings


def append(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    window_k: torch.Tensor,
    window_v: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    encode_source: torch.Tensor,
    anchors: torch.Tensor,
    anchor_slots: torch.Tensor,
    residuals: torch.Tensor,
    residual_slots: torch.Tensor,
    settings: Settings,
    target: Target,
) -> None:
    """Write row b's token to (slots[b], offsets[b]) of the window, then encode its window page
    encode_source[b]. In place; neither waits for the device nor allocates (see `encode_pages`).

    k_new, v_new: [B, H, D], equal strides, the last dimension contiguous.
    window_k, window_v: [W, P, H, D] of the same dtype, written; see `encode_pages` for strides.
    slots, offsets: [B] int32 or int64. A slot of -1 is a row without a token: nothing is written.
    encode_source: [B] int32 or int64, window pages, -1 for none. A page may be the one that the
        row's own token completes; none may be written by another row of the call.
    anchors, anchor_slots, residuals, residual_slots: as in `encode_pages`, the slots [B]; those of
        rows without a page are not looked at.
    Raises FormatError and ValueError like `encode_pages`. Indices are not checked on the device.
    """
    encoding.check_pages(window_k, window_v, "window_k and window_v")
    _, page_size, num_heads, head_dim = window_k.shape
    constants = encoding.encode_constants(settings, target, page_size, head_dim, window_k.dtype)
    encoding.check_tokens(k_new, v_new, window_k)
    encoding.check_records(anchors, constants.anchor_layout, num_heads, "anchors")
    encoding.check_records(residuals, constants.residual_layout, num_heads, "residuals")
    indices = {
        "slots": slots,
        "offsets": offsets,
        "encode_source": encode_source,
        "anchor_slots": anchor_slots,
        "residual_slots": residual_slots,
    }
    encoding.check_indices(len(k_new), **indices)
    encoding.check_devices(window_k.device, anchors=anchors, residuals=residuals, **indices)
    if len(k_new) == 0 or num_heads == 0:
        return
    new_pairs, window_pairs = encoding.pairs(k_new), encoding.pairs(window_k)
    anchor_words, residual_words = anchors.view(torch.int32), residuals.view(torch.int32)
    append_kernel[(len(k_new) * 2 * num_heads,)](
        k_new_ptr=new_pairs,
        v_new_ptr=encoding.pairs(v_new),
        window_k_ptr=window_pairs,
        window_v_ptr=encoding.pairs(window_v),
        slots_ptr=slots,
        offsets_ptr=offsets,
        encode_source_ptr=encode_source,
        anchors_ptr=anchor_words,
        anchor_slots_ptr=anchor_slots,
        residuals_ptr=residual_words,
        residual_slots_ptr=residual_slots,
        edges_ptr=encoding.integer_edges(settings, window_k.device),
        one=1,
        num_heads=num_heads,
        stride_new=new_pairs.stride(0),
        stride_new_head=new_pairs.stride(1),
        stride_page=window_pairs.stride(0),
        stride_head=window_pairs.stride(2),
        stride_anchor=anchor_words.stride(0),
        stride_anchor_head=anchor_words.stride(1),
        stride_residual=residual_words.stride(0),
        stride_residual_head=residual_words.stride(1),
        stride_token=window_pairs.stride(1),
        **constants.launch,
    )
