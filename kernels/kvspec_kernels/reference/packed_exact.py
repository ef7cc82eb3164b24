"""The packed exact residual in plain torch: the specification of its kernels (packed_format.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvspec_kernels.codecs.packed_sizes import HEADER_BYTES
from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.packed_format import (
    ESCAPE_BITS,
    LAST_STEP,
    NEAR_ZERO,
    RAW_OFFSET,
    PackedLayout,
    code_width,
)
from kvspec_kernels.reference import fragments

# Exponent bits of fp32 that mean infinity or NaN, and by how much fp16's exponents are smaller.
NOT_FINITE = 255
FP16_BIAS = 112
WORD_BITS = 32


class Packed(NamedTuple):
    """Packed residuals of N pages. records: [N, H, nbytes] uint8. fits: which records fit, [N, H]
    bool. words: words of a body that each needs, [N, H] int64. raw_v: V of records that do not fit,
    in order of pages and heads, [number of them, raw_nbytes] uint8."""

    records: torch.Tensor
    fits: torch.Tensor
    words: torch.Tensor
    raw_v: torch.Tensor


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    anchor_values: tuple[torch.Tensor, torch.Tensor],
    anchors: torch.Tensor,
    anchor_layout: RecordLayout,
    layout: PackedLayout,
) -> Packed:
    """Encode pages k, v [N, P, H, D] of the layout's dtype. anchor_values: what the anchor records
    `anchors` [N, H, bytes] decode to, like k and v."""
    shape = (k.shape[0], k.shape[2])
    starts, bodies, used = [], [], torch.zeros(shape, dtype=torch.int64, device=k.device)
    for part, pages, values in zip("kv", (k, v), anchor_values, strict=True):
        rule = _Rule.of(part, values, anchors, anchor_layout, layout)
        bits = _segments(_bits(pages), part, layout)
        code, escaped = rule.code(bits)
        offset, escape_offset, num_words = _places(rule.width, escaped)
        # Words before each segment, those of K before those of V.
        first = used[..., None] + num_words.cumsum(-1) - num_words
        used = used + num_words.sum(-1)
        starts.append(first)
        begin = first[..., None] * WORD_BITS
        bodies.append((begin + offset, code))
        bodies.append((torch.where(escaped, begin + escape_offset, -1), bits & 0xFFFF))
    fits = used <= layout.body_words
    body = torch.zeros((*shape, layout.body_words + 2), dtype=torch.int64, device=k.device)
    for at, code in bodies:
        _put(body, torch.where(fits[..., None, None], at, -1), code)
    records = torch.zeros((*shape, layout.nbytes), dtype=torch.uint8, device=k.device)
    heads = torch.cat((fits[..., None].long(), torch.zeros_like(used)[..., None], *starts), -1)
    heads = torch.where(fits[..., None], heads, 0).to(torch.int32).to(torch.int16)
    records[..., : layout.body_offset] = heads.contiguous().view(torch.uint8)
    words = body[..., : layout.body_words].to(torch.int32).contiguous()
    records[..., layout.body_offset :] = words.view(torch.uint8)
    raw_k, raw_v = (_raw(pages)[~fits] for pages in (k, v))
    unfit = records[~fits]
    unfit[:, RAW_OFFSET : RAW_OFFSET + layout.raw_nbytes] = raw_k
    records[~fits] = unfit
    return Packed(records, fits, used, raw_v)


def decode(
    records: torch.Tensor,
    raw_v: torch.Tensor,
    anchor_values: tuple[torch.Tensor, torch.Tensor],
    anchors: torch.Tensor,
    anchor_layout: RecordLayout,
    layout: PackedLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode records into new pages (k, v) [N, P, H, D], bit by bit what encode() was given. raw_v:
    as encode() gave it; where rows are missing, V is garbage. Other arguments: as for encode()."""
    heads = records[..., : layout.body_offset].contiguous().view(torch.int16).long() & 0xFFFF
    fits = heads[..., 0] == 1
    body = records[..., layout.body_offset :].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    # A damaged record must not read outside of its body.
    body = F.pad(body, (0, 2))
    first = torch.unflatten(heads[..., HEADER_BYTES // 2 :], -1, (2, layout.num_segments))
    pages = []
    for number, (part, values) in enumerate(zip("kv", anchor_values, strict=True)):
        rule = _Rule.of(part, values, anchors, anchor_layout, layout)
        begin = first[..., number, :, None] * WORD_BITS
        offset, escape_begin = _code_places(rule.width)
        code = _get(body, begin + offset, rule.width)
        escaped = code == (1 << rule.width) - 1
        rank = escaped.long().cumsum(-1) - 1
        raw = _get(body, begin + escape_begin + rank * ESCAPE_BITS, torch.full_like(code, 16))
        bits = torch.where(escaped, raw, rule.bits(code))
        pages.append(_pages(bits, part, layout))
    raw_k = records[~fits][:, RAW_OFFSET : RAW_OFFSET + layout.raw_nbytes]
    for page, raw in zip(pages, (raw_k, raw_v), strict=True):
        by_head = page.transpose(1, 2)
        at = torch.nonzero(~fits)[: len(raw)]
        values = raw[: len(at)].contiguous().view(layout.dtype)
        by_head[at[:, 0], at[:, 1]] = values.view(-1, layout.page_size, layout.head_dim)
    return pages[0], pages[1]


class _Rule:
    """How each value of a part is coded, in segments [N, H, segments, values] int64. width: bits of
    a code. near: whether the code is a sign and a distance below `top`. order: ord(a)."""

    def __init__(
        self, width: torch.Tensor, near: torch.Tensor, order: torch.Tensor, top: torch.Tensor
    ) -> None:
        self.width, self._near, self._order, self._top = width, near, order, top
        # The largest number that is no escape, of a distance and of a difference in each direction.
        self._last = (1 << (width - 1)) - 1

    @classmethod
    def of(
        cls,
        part: str,
        values: torch.Tensor,
        anchors: torch.Tensor,
        anchor_layout: RecordLayout,
        layout: PackedLayout,
    ) -> _Rule:
        """Derive the rule from anchors alone. values: pages [N, P, H, D] that they decode to."""
        magnitude = values.float().abs().contiguous().view(torch.int32)
        scale = _scales(part, anchors, anchor_layout, values.shape).view(torch.int32)
        steps = (magnitude >> 22) - (scale >> 22)
        exponent = scale >> 23
        is_finite = (exponent < NOT_FINITE) & (magnitude >> 23 < NOT_FINITE)
        nearest, mantissa = NEAR_ZERO - 1, layout.mantissa_bits
        steps = torch.where(is_finite, steps.clamp(nearest, LAST_STEP), nearest)
        widths = [code_width(step, mantissa) for step in range(nearest, LAST_STEP + 1)]
        width = torch.tensor(widths, device=steps.device)[steps - nearest]
        if layout.dtype == torch.float16:
            exponent = exponent - FP16_BIAS
        top = ((exponent.clamp_min(0) + 1) << mantissa) - 1
        return cls(
            _segments(width, part, layout),
            _segments(steps < NEAR_ZERO, part, layout),
            _segments(_order(_bits(values)), part, layout).long(),
            _segments(top.clamp_max(0x7FFF), part, layout).long(),
        )

    def code(self, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of values, and which of them escaped. bits: int64, 16 of them signed."""
        sign, below = (bits < 0).long(), self._top - (bits & 0x7FFF)
        difference = _order(bits) - self._order
        escaped = torch.where(
            self._near, (below < 0) | (below >= self._last), difference.abs() > self._last
        )
        code = torch.where(self._near, below << 1 | sign, difference + self._last)
        return torch.where(escaped, (1 << self.width) - 1, code), escaped

    def bits(self, code: torch.Tensor) -> torch.Tensor:
        """Return the bits of values that did not escape: 16 bits in int64."""
        magnitude = (self._top - (code >> 1)) & 0x7FFF
        ordered = code - self._last + self._order
        far = torch.where(ordered < 0, ~ordered & 0x7FFF | 0x8000, ordered)
        return torch.where(self._near, magnitude | (code & 1) << 15, far)


def _order(bits: torch.Tensor) -> torch.Tensor:
    """Return the place of each value among all numbers in order. bits: 16 bits, signed."""
    return torch.where(bits < 0, -1 - (bits & 0x7FFF), bits)


def _raw(pages: torch.Tensor) -> torch.Tensor:
    """Return the bytes of pages [N, P, H, D] by head, [N, H, P * D * bytes of a value] uint8."""
    return pages.transpose(1, 2).contiguous().flatten(2).view(torch.uint8)


def _bits(pages: torch.Tensor) -> torch.Tensor:
    """Return the bits of 16-bit values as signed int64."""
    return pages.contiguous().view(torch.int16).long()


def _scales(
    part: str, anchors: torch.Tensor, layout: RecordLayout, shape: torch.Size
) -> torch.Tensor:
    """Return the scale of each value of pages of `shape` [N, P, H, D], fp32."""
    # K: by head, group of tokens and channel. V: by head and token.
    by_head = fragments.LOAD[part](layout[f"{part}_scale"].view(anchors)).float()
    if part == "k":
        by_head = by_head.repeat_interleave(shape[1] // by_head.shape[2], 2)
    else:
        by_head = by_head[..., None].expand(-1, -1, -1, shape[3])
    return by_head.transpose(1, 2).contiguous()


def _segments(values: torch.Tensor, part: str, layout: PackedLayout) -> torch.Tensor:
    """Return pages [N, P, H, D] in stored order, [N, H, segments, values of a segment]."""
    words = fragments.codes_to_words(values, part)
    return words.reshape(*words.shape[:2], layout.num_segments, layout.segment_values)


def _pages(bits: torch.Tensor, part: str, layout: PackedLayout) -> torch.Tensor:
    """Invert _segments for 16 bits a value, and return pages of the layout's dtype."""
    words = bits.to(torch.int32).to(torch.int16).reshape(*bits.shape[:2], -1, 8)
    pages = fragments.codes_from_words(words, part, layout.page_size)
    return pages.transpose(1, 2).contiguous().view(layout.dtype)


def _code_places(width: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each code begins in its segment, and where the segment's escapes begin, in
    bits."""
    end = width.cumsum(-1)
    begin_of_escapes = (end[..., -1:] + 15) // 16 * 16
    return end - width, begin_of_escapes


def _places(
    width: torch.Tensor, escaped: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where each code begins in its segment, where the raw bits of each escape begin, both
    in bits, and the words of each segment."""
    offset, escapes = _code_places(width)
    rank = escaped.long().cumsum(-1)
    num_bits = escapes[..., 0] + rank[..., -1] * ESCAPE_BITS
    return offset, escapes + (rank - 1) * ESCAPE_BITS, (num_bits + WORD_BITS - 1) // WORD_BITS


def _put(body: torch.Tensor, at: torch.Tensor, code: torch.Tensor) -> None:
    """Add codes of up to 16 bits to words of 32 bits, in place. body: [N, H, words] int64. at: the
    first bit of each, [N, H, segments, values]; -1 for none."""
    at, code = at.flatten(-2), torch.where(at < 0, 0, code).flatten(-2)
    word, shifted = at.clamp_min(0) >> 5, code << (at & 31)
    body.scatter_add_(-1, word, shifted & 0xFFFFFFFF)
    body.scatter_add_(-1, word + 1, shifted >> WORD_BITS)


def _get(body: torch.Tensor, at: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Return codes of `width` bits. body: [N, H, words + 2] int64. at: their first bits."""
    word = (at >> 5).flatten(-2).clamp(0, body.shape[-1] - 2)
    low, high = body.gather(-1, word), body.gather(-1, word + 1)
    both = (low | high << WORD_BITS).view_as(at)
    return (both >> (at & 31)) & ((1 << width) - 1)
