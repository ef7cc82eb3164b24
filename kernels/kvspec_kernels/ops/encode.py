"""Pages into anchor and residual records, all pages and heads of a layer in one launch."""

from __future__ import annotations

import torch

from kvspec_kernels.formats import Target
from kvspec_kernels.jit.encode import encode_kernel
from kvspec_kernels.ops import encoding
from kvspec_kernels.ops.encoding import Settings


def encode_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    source: torch.Tensor,
    anchors: torch.Tensor,
    anchor_slots: torch.Tensor,
    residuals: torch.Tensor,
    residual_slots: torch.Tensor,
    settings: Settings,
    target: Target,
) -> None:
    """Encode pages `source` of k, v into `anchors` and `residuals`, in place.

    Bytes are those of reference/log4.py and reference/uniform4.py, and for the target exact of
    reference/exact.py, but for codes of no meaning: of pages with NaN or infinities, and in
    uniform4 of groups whose range is wider than fp32 holds. Exact residuals always hold every bit.
    Neither waits for the device nor allocates, but for one small table at the
    first call with given settings: capture into a CUDA graph after a first run.

    k, v: [S, P, H, D] bf16, fp16 or fp32, equal strides, the last dimension contiguous.
    source: [N] int32 or int64, pages of k and v; an entry of -1 is skipped.
    anchors: [A, H, anchor bytes] uint8; anchor_slots: [N], where entries go. Slots of entries that
        are not skipped must be valid and distinct: nothing on the device checks them.
    residuals, residual_slots: likewise, [R, H, residual bytes] and [N].
    Raises FormatError for sizes and settings that have no records or no kernel, ValueError for
    tensors that do not fit.
    """
    encoding.check_pages(k, v, "k and v")
    _, page_size, num_heads, head_dim = k.shape
    constants = encoding.encode_constants(settings, target, page_size, head_dim, k.dtype)
    encoding.check_records(anchors, constants.anchor_layout, num_heads, "anchors")
    encoding.check_records(residuals, constants.residual_layout, num_heads, "residuals")
    indices = {"source": source, "anchor_slots": anchor_slots, "residual_slots": residual_slots}
    encoding.check_indices(len(source), **indices)
    encoding.check_devices(k.device, anchors=anchors, residuals=residuals, **indices)
    if len(source) == 0 or num_heads == 0:
        return
    k_pairs, v_pairs = encoding.pairs(k), encoding.pairs(v)
    anchor_words, residual_words = anchors.view(torch.int32), residuals.view(torch.int32)
    encode_kernel[(len(source) * 2 * num_heads,)](
        k_ptr=k_pairs,
        v_ptr=v_pairs,
        source_ptr=source,
        anchors_ptr=anchor_words,
        anchor_slots_ptr=anchor_slots,
        residuals_ptr=residual_words,
        residual_slots_ptr=residual_slots,
        edges_ptr=encoding.integer_edges(settings, k.device),
        one=1,
        num_heads=num_heads,
        stride_page=k_pairs.stride(0),
        stride_head=k_pairs.stride(2),
        stride_anchor=anchor_words.stride(0),
        stride_anchor_head=anchor_words.stride(1),
        stride_residual=residual_words.stride(0),
        stride_residual_head=residual_words.stride(1),
        stride_token=k_pairs.stride(1),
        **constants.launch,
    )
