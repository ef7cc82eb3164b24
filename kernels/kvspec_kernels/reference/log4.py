"""Log-quantised anchors and corrections (Lynx, Algorithm 1) in plain torch: the specification of
the kernels.

Per channel and chunk of tokens: subtract a centre, divide by a scale, quantise magnitude and sign
(`companding.py`). Anchor value: centre + scale * level[code]. Refined (int8) value: centre +
scale * sign * ((1 + a)^(I / top) - 1) / a, with I = 16 m - correction. Products are rounded to
fp32 before the sum, never fused. Results are clamped to the finite range of the KV dtype. Anchors
of 2 bits hold half of the same code, numbered in the order of values (`formats.py`).

Deviations from Algorithm 1, besides those of `companding.py`:
- Stage 1 (page-level normalisation) is left out, because stage 2 undoes it. Centre and scale here
  are those of the raw values.
- The sign is that of the centred value. Line 12 takes the sign before centring, where all values
  are positive.
- Centres are bf16 and scales 12-bit floats rounded up (`formats.py`). Codes are chosen against
  the metadata as stored, so that the corrections also repair its rounding.
- The centre is the middle of the range by default: it needs the smallest scale. The middle is also
  the same on every device, unlike a sum.
"""

from __future__ import annotations

import torch

from kvspec_kernels.codecs.log4 import Log4Settings
from kvspec_kernels.formats import TWO_BIT_MIDDLE, TWO_BIT_STEP, RecordLayout
from kvspec_kernels.reference import fragments, nibbles
from kvspec_kernels.reference.codec import IntegerPart
from kvspec_kernels.reference.companding import Tables, tables

SCALE_SHIFT = 19
LARGEST_FP32 = 0x7F7FFFFF
LARGEST_SCALE = LARGEST_FP32 >> SCALE_SHIFT
LARGEST_OFFSET = 255


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    settings: Log4Settings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode pages k, v [N, P, H, D] into anchor records [N, H, nbytes] uint8, and into residual
    records of 4-bit corrections if their layout is given."""
    leading = (k.shape[0], k.shape[2])
    anchors = anchor_layout.empty_records(leading, k.device)
    residuals = residual_layout.empty_records(leading, k.device) if residual_layout else None
    bases = anchor_layout["scale_base"].view(anchors)
    law = tables(settings, k.device)
    for index, (part, pages) in enumerate((("k", k), ("v", v))):
        rows = anchor_layout[f"{part}_centre"].shape[0]
        chunks = torch.unflatten(pages.float(), 1, (rows, -1))
        centre, scale, base, offset = _metadata(chunks, settings)
        for name, stored in (("centre", centre), ("scale", offset)):
            by_head = fragments.STORE[part](stored.squeeze(2).transpose(1, 2))
            anchor_layout[f"{part}_{name}"].view(anchors).copy_(by_head)
        bases[..., index] = base
        codes, corrections = _quantise(chunks, centre, scale, law, settings, residuals is not None)
        words = fragments.codes_to_words(codes, part)
        if settings.anchor_bits == 4:
            packed = fragments.pack_sign_magnitude(words)
        else:
            packed = fragments.pack_pairs(in_order(words) >> 2)
        fragments.store_words(packed, anchors, part, anchor_layout)
        if residuals is not None and residual_layout is not None and corrections is not None:
            if settings.anchor_bits == 2:
                packed = fragments.pack_pairs(in_order(words) & 3)
                fragments.store_words(packed, residuals, part, residual_layout, "rest")
            packed = fragments.pack_by_halves(fragments.codes_to_words(corrections, part))
            fragments.store_words(packed, residuals, part, residual_layout)
    return anchors, residuals


def decode_anchor(
    anchors: torch.Tensor, settings: Log4Settings, layout: RecordLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode anchor records [N, H, nbytes] into pages (k, v) [N, P, H, D] `dtype`."""
    law = tables(settings, anchors.device)

    def part(name: str) -> torch.Tensor:
        packed = fragments.packed_words(anchors, name, layout)
        if settings.anchor_bits == 4:
            codes = fragments.unpack_sign_magnitude(packed)
        else:
            codes = fragments.unpack_pairs(packed)
        return _scaled(law.levels[codes.int()], name, anchors, layout, dtype)

    return part("k"), part("v")


def decode_refined(
    anchors: torch.Tensor,
    residuals: torch.Tensor,
    settings: Log4Settings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode anchor and correction records into 8-bit pages (k, v) [N, P, H, D] `dtype`."""
    law = tables(settings, anchors.device)

    def part(name: str) -> torch.Tensor:
        packed = fragments.packed_words(anchors, name, anchor_layout)
        if settings.anchor_bits == 4:
            codes = fragments.unpack_sign_magnitude(packed)
        else:
            rest = fragments.packed_words(residuals, name, residual_layout, "rest")
            codes = from_order(fragments.unpack_pairs(packed) << 2 | fragments.unpack_pairs(rest))
        packed = fragments.packed_words(residuals, name, residual_layout)
        corrections = fragments.by_halves(nibbles.unpack(packed))
        words = law.refined[(codes | corrections << 4).int()]
        return _scaled(words, name, anchors, anchor_layout, dtype)

    return part("k"), part("v")


def encode_table(settings: Log4Settings, head_dim: int) -> list[float]:
    """See kvspec_kernels.reference.codec.KernelReference."""
    edges: list[float] = tables(settings, torch.device("cpu")).integer_edges.tolist()
    return edges


def code_values(
    settings: Log4Settings, head_dim: int, device: torch.device, *, refined: bool
) -> torch.Tensor | None:
    """See kvspec_kernels.reference.codec.KernelReference."""
    law = tables(settings, device)
    return law.refined if refined else law.levels


def integer_part(
    name: str, anchors: torch.Tensor, settings: Log4Settings, layout: RecordLayout
) -> IntegerPart:
    """See kvspec_kernels.reference.codec.KernelReference."""
    assert settings.anchor_bits == 2
    words = fragments.unpack_pairs(fragments.packed_words(anchors, name, layout))
    index = {"k": 0, "v": 1}[name]
    base = layout["scale_base"].view(anchors)[..., index].int()[..., None, None]
    offsets = fragments.LOAD[name](layout[f"{name}_scale"].view(anchors)).int()
    scale = (base + offsets << SCALE_SHIFT).view(torch.float32).double()
    centre = fragments.LOAD[name](layout[f"{name}_centre"].view(anchors)).double()
    page_size = words.shape[-2] * fragments.WORD_CODES // centre.shape[-1]
    codes = fragments.codes_from_words(words, name, page_size)
    unit = 2 * TWO_BIT_STEP / settings.top
    return IntegerPart(codes.double(), TWO_BIT_MIDDLE, scale * unit, centre)


def in_order(codes: torch.Tensor) -> torch.Tensor:
    """Renumber codes 0..15, magnitude m in bits 0-2 and sign in bit 3, in the order of their
    values: 8 + m, or 7 - m if negative."""
    return codes ^ torch.where(codes < 8, 8, 15).to(codes.dtype)


def from_order(codes: torch.Tensor) -> torch.Tensor:
    """Invert in_order."""
    return codes ^ torch.where(codes < 8, 15, 8).to(codes.dtype)


def _metadata(
    chunks: torch.Tensor, settings: Log4Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the metadata of chunks [N, R, C, H, D] fp32, as stored.

    Returns centre and scale [N, R, 1, H, D] fp32 as a decoder reads them, base [N, H] int16 and
    offset [N, R, 1, H, D] uint8.
    """
    low, high = chunks.amin(2, keepdim=True), chunks.amax(2, keepdim=True)
    # Halve and divide before summing: the sum of two values near the dtype's maximum overflows.
    if settings.centre == "midrange":
        centre = low / 2 + high / 2
    else:
        centre = (chunks / chunks.shape[2]).sum(2, keepdim=True)
    limit = torch.finfo(torch.bfloat16).max
    # amin may return 0.0 or -0.0; + 0.0 turns both into 0.0.
    centre = centre.clamp(-limit, limit).bfloat16().float() + 0.0
    reach = torch.maximum(high - centre, centre - low)
    bits = reach.view(torch.int32).clamp(0, LARGEST_FP32)
    rounded_up = (bits + ((1 << SCALE_SHIFT) - 1) >> SCALE_SHIFT).clamp_max(LARGEST_SCALE)
    base = (rounded_up.amax((1, 2, 4)) - LARGEST_OFFSET).clamp_min(0)
    base_of_chunk = base[:, None, None, :, None]
    # Scales below 2^-16 of the record's largest are raised to that floor. The error of such a chunk
    # is still far below the step of the others.
    offset = (rounded_up - base_of_chunk).clamp_min(0)
    scale = (base_of_chunk + offset << SCALE_SHIFT).view(torch.float32)
    return centre, scale, base.to(torch.int16), offset.to(torch.uint8)


def _quantise(
    chunks: torch.Tensor,
    centre: torch.Tensor,
    scale: torch.Tensor,
    law: Tables,
    settings: Log4Settings,
    with_corrections: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return anchor codes [N, P, H, D] uint8, and corrections in -8..7 int32 if with_corrections.

    A code has its magnitude in bits 0-2 and its sign in bit 3, so that -0 has its own code.
    """
    centred = chunks - centre
    # A zero scale means that every value equals the centre.
    magnitude = centred.abs() / torch.where(scale > 0, scale, 1.0)
    corrections = None
    if settings.alpha == 0:
        # The linear law is a product, which rounds alike on every device. Only decoding uses its
        # tables.
        integer = (magnitude * settings.top).round().clamp_max(settings.top).nan_to_num(0.0).int()
        anchor = (integer + 7 >> 4).to(torch.uint8)
    else:
        anchor = torch.zeros(magnitude.shape, dtype=torch.uint8, device=magnitude.device)
        # Seven comparisons are ten times as fast as a bisection per element.
        for edge in law.magnitude_edges:
            anchor += magnitude >= edge
        if with_corrections:
            integer = torch.bucketize(magnitude, law.integer_edges, right=True, out_int32=True)
    if with_corrections:
        corrections = (16 * anchor.int() - integer).flatten(1, 2)
    codes = anchor | (centred < 0).to(torch.uint8) << 3
    return codes.flatten(1, 2), corrections


def _scaled(
    words: torch.Tensor,
    name: str,
    anchors: torch.Tensor,
    layout: RecordLayout,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return centre + scale * values as pages [N, P, H, D] `dtype`. words: values in stored order
    [N, H, words, 8] fp32."""
    part = {"k": 0, "v": 1}[name]
    base = layout["scale_base"].view(anchors)[..., part].int()[..., None, None]
    offset = fragments.LOAD[name](layout[f"{name}_scale"].view(anchors)).int()
    scale = (base + offset << SCALE_SHIFT).view(torch.float32)
    centre = fragments.LOAD[name](layout[f"{name}_centre"].view(anchors)).float()
    page_size = words.shape[-2] * fragments.WORD_CODES // centre.shape[-1]
    values = fragments.codes_from_words(words, name, page_size)
    # A view [N, H, chunks, tokens of a chunk, D].
    by_chunk = torch.unflatten(values, 2, (centre.shape[2], -1))
    by_chunk.mul_(scale[..., None, :]).add_(centre[..., None, :])
    limit = torch.finfo(dtype).max
    # Check per chunk: clamping every value would cost as much as the sum.
    if bool((centre.abs() + scale > limit).any()):
        values.clamp_(-limit, limit)
    return values.transpose(1, 2).to(dtype).contiguous()
