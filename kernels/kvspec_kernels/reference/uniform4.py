"""Uniform 4-bit anchors and corrections (QuantSpec, section 4.2) in plain torch: the specification
of the kernels.

Asymmetric codes u in 0..15 with scale s and zero z: K per channel over a group of tokens, V per
token over the head. The correction l in -8..7 is the symmetric 4-bit code of the anchor's error in
steps of s / 16. Anchor value: u s + z. Refined (int8) value: (16 u + l) (s / 16) + z, the paper's
8-bit form of u s + l s / 16 + z, whose factors are exact in fp32. Products are rounded to fp32
before the sum. Results are clamped to the finite range of the KV dtype. Anchors of 2 bits hold
u >> 2 and decode to (4 (u >> 2) + 1.5) s + z; the rest of u is in the residual.

s and z are bf16, and codes are chosen against the rounded s and z. Where rounding moved them, the
outermost values are clipped to codes 0 and 15, and the correction reduces the error as far as its
range allows. A group whose range exceeds fp32 decodes to finite but meaningless values.
"""

from __future__ import annotations

import torch

from kvspec_kernels.codecs.uniform4 import Uniform4Settings
from kvspec_kernels.formats import TWO_BIT_MIDDLE, RecordLayout
from kvspec_kernels.reference import fragments, integer_groups, nibbles
from kvspec_kernels.reference.codec import IntegerPart

CODES = 16
MIDDLE = 7.5


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    settings: Uniform4Settings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode pages k, v [N, P, H, D] into anchor records [N, H, nbytes] uint8, and into residual
    records of 4-bit corrections if their layout is given."""
    leading = (k.shape[0], k.shape[2])
    anchors = anchor_layout.empty_records(leading, k.device)
    residuals = residual_layout.empty_records(leading, k.device) if residual_layout else None
    for part, pages in (("k", k), ("v", v)):
        groups, dim = _grouped(pages.float(), part, anchor_layout)
        scale, zero = integer_groups.scale_and_zero(groups, dim, CODES - 1)
        for name, stored in (("scale", scale), ("zero", zero)):
            by_head = fragments.STORE[part](stored.squeeze(dim).transpose(1, 2))
            anchor_layout[f"{part}_{name}"].view(anchors).copy_(by_head)
        # A zero scale means that every value of the group equals the zero point.
        step = torch.where(scale > 0, scale, 1.0)
        codes = ((groups - zero) / step).round().clamp(0, CODES - 1)
        words = _words(codes, pages.shape, part)
        two_bit = settings.anchor_bits == 2
        packed = fragments.pack_pairs(words >> 2) if two_bit else fragments.pack_by_halves(words)
        fragments.store_words(packed, anchors, part, anchor_layout)
        if residuals is not None and residual_layout is not None:
            if two_bit:
                packed = fragments.pack_pairs(words & 3)
                fragments.store_words(packed, residuals, part, residual_layout, "rest")
            error = groups - (codes * scale + zero)
            lower = (error * CODES / step).round().clamp(-8, 7)
            packed = fragments.pack_by_halves(_words(lower, pages.shape, part))
            fragments.store_words(packed, residuals, part, residual_layout)
    return anchors, residuals


def decode_anchor(
    anchors: torch.Tensor, settings: Uniform4Settings, layout: RecordLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode anchor records [N, H, nbytes] into pages (k, v) [N, P, H, D] `dtype`."""
    table = nibbles.pair_table(torch.arange(16, dtype=torch.float32, device=anchors.device))

    def part(name: str) -> torch.Tensor:
        packed = fragments.packed_words(anchors, name, layout)
        if settings.anchor_bits == 4:
            words = fragments.by_halves(nibbles.look_up(table, packed))
        else:
            words = fragments.unpack_pairs(packed).float().mul_(4).add_(TWO_BIT_MIDDLE)
        return _scaled(words, 1.0, name, anchors, layout, dtype)

    return part("k"), part("v")


def decode_refined(
    anchors: torch.Tensor,
    residuals: torch.Tensor,
    settings: Uniform4Settings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode anchor and correction records into 8-bit pages (k, v) [N, P, H, D] `dtype`."""

    def part(name: str) -> torch.Tensor:
        packed = fragments.packed_words(anchors, name, anchor_layout)
        lower = nibbles.unpack_signed(fragments.packed_words(residuals, name, residual_layout))
        if settings.anchor_bits == 4:
            combined = nibbles.unpack(packed).float().mul_(CODES).add_(lower)
            words = fragments.by_halves(combined)
        else:
            rest = fragments.packed_words(residuals, name, residual_layout, "rest")
            upper = fragments.unpack_pairs(packed) << 2 | fragments.unpack_pairs(rest)
            words = upper.float().mul_(CODES).add_(fragments.by_halves(lower))
        return _scaled(words, 1 / CODES, name, anchors, anchor_layout, dtype)

    return part("k"), part("v")


def encode_table(settings: Uniform4Settings, head_dim: int) -> list[float]:
    """See kvspec_kernels.reference.codec.KernelReference."""
    return []


def code_values(
    settings: Uniform4Settings, head_dim: int, device: torch.device, *, refined: bool
) -> torch.Tensor | None:
    """See kvspec_kernels.reference.codec.KernelReference."""
    return None


def integer_part(
    name: str, anchors: torch.Tensor, settings: Uniform4Settings, layout: RecordLayout
) -> IntegerPart:
    """See kvspec_kernels.reference.codec.KernelReference."""
    packed = fragments.packed_words(anchors, name, layout)
    if settings.anchor_bits == 2:
        words, unit, zero = fragments.unpack_pairs(packed), 4.0, TWO_BIT_MIDDLE
    else:
        words, unit, zero = fragments.by_halves(nibbles.unpack(packed)), 1.0, MIDDLE
    scale, low = (
        fragments.LOAD[name](layout[f"{name}_{field}"].view(anchors)).double()
        for field in ("scale", "zero")
    )
    if name == "v":
        scale, low = scale[..., None], low[..., None]
    codes = fragments.codes_from_words(words, name, layout["v_scale"].shape[0])
    return IntegerPart(codes.double(), zero, scale * unit, low + MIDDLE * scale)


def _grouped(pages: torch.Tensor, part: str, layout: RecordLayout) -> tuple[torch.Tensor, int]:
    """Return pages [N, P, H, D] reshaped so that one dimension runs over a quantisation group, and
    that dimension. K becomes [N, groups, tokens, H, D]; V is unchanged."""
    if part == "v":
        return pages, 3
    return torch.unflatten(pages, 1, (layout["k_scale"].shape[0], -1)), 2


def _words(codes: torch.Tensor, shape: torch.Size, part: str) -> torch.Tensor:
    """Return float codes as int32 words [N, H, words, 8]. shape: that of the pages [N, P, H, D]."""
    integers = codes.nan_to_num(0.0).to(torch.int32).view(shape)
    return fragments.codes_to_words(integers, part)


def _scaled(
    words: torch.Tensor,
    step: float,
    name: str,
    anchors: torch.Tensor,
    layout: RecordLayout,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return codes * (scale * step) + zero as pages [N, P, H, D] `dtype`. words: codes in stored
    order [N, H, words, 8] fp32."""
    scale = fragments.LOAD[name](layout[f"{name}_scale"].view(anchors)).float() * step
    zero = fragments.LOAD[name](layout[f"{name}_zero"].view(anchors)).float()
    page_size = layout["v_scale"].shape[0]
    values = fragments.codes_from_words(words, name, page_size)
    if name == "k":
        by_group = torch.unflatten(values, 2, (scale.shape[2], -1))
        by_group.mul_(scale[..., None, :]).add_(zero[..., None, :])
    else:
        values.mul_(scale[..., None]).add_(zero[..., None])
    limit = torch.finfo(dtype).max
    if bool((zero.abs() + scale * (CODES / step) > limit).any()):
        values.clamp_(-limit, limit)
    return values.transpose(1, 2).to(dtype).contiguous()
