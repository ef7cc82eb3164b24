"""The a-law of the log codec as tables: thresholds for encoding, values for decoding.

Source: Lynx, section 4.1 and Algorithm 1, lines 10-18. A magnitude x in [0, 1] (units of the
chunk's scale) becomes the integer I = round(top * ln(1 + a x) / ln(1 + a)). I becomes
m = (I + 7) >> 4 (the anchor) and 16 m - I (the correction).

Tables are evaluated in double precision and rounded to fp32 once. The encoder compares with
thresholds instead of evaluating a logarithm, so that codes are equal on every device. The linear
law (alpha 0) has no logarithm: I is the fp32 product top * x, rounded half to even.

Two deviations from Algorithm 1, both needed to keep anchor and correction in 4 bits:
- `top` is at most 120. The paper has 127, but (127 + 7) >> 4 = 8 does not fit three bits. With
  I <= 120, m is in 0..7 and I in [16 m - 7, 16 m + 8], so the correction is in [-8, 7].
- The anchor decodes to a level inside its interval rather than to 16 m, which is near the lower
  edge. The eight levels and two signs then give 16 distinct values (0 and -0 differ).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from kvspec_kernels.codecs.log4 import Log4Settings
from kvspec_kernels.formats import TWO_BIT_STEP

MAGNITUDES = 8


@dataclass(frozen=True)
class Tables:
    """Tables of one law, all fp32 on one device.

    magnitude_edges [7]: the anchor magnitude is the number of edges <= x.
    integer_edges [top]: I is the number of edges <= x.
    levels [16, or 4 for 2-bit anchors]: value of an anchor code, in units of the scale.
    refined [256]: value of 4-bit code | correction nibble << 4, in units of the scale.
    """

    magnitude_edges: torch.Tensor
    integer_edges: torch.Tensor
    levels: torch.Tensor
    refined: torch.Tensor


@functools.lru_cache(maxsize=32)
def tables(settings: Log4Settings, device: torch.device) -> Tables:
    """Return the tables of `settings`. They are built once per device."""
    integer_edges = [expand(i - 0.5, settings) for i in range(1, settings.top + 1)]
    refined = [refined_value(byte & 15, byte >> 4, settings) for byte in range(256)]
    as_fp32 = functools.partial(torch.tensor, dtype=torch.float32, device=device)
    return Tables(
        magnitude_edges=as_fp32([integer_edges[16 * m - 8] for m in range(1, MAGNITUDES)]),
        integer_edges=as_fp32(integer_edges),
        levels=as_fp32(signed_levels(settings)),
        refined=as_fp32(refined),
    )


def expand(integer: float, settings: Log4Settings) -> float:
    """Return the magnitude, in units of the scale, that the law maps to `integer`."""
    a = settings.alpha
    if a == 0:
        return integer / settings.top
    return math.expm1(integer / settings.top * math.log1p(a)) / a


def magnitude_levels(settings: Log4Settings) -> list[float]:
    """Return the values of the eight anchor magnitudes, in units of the scale.

    On K and V of a trained model, the middle of an interval is within 1% of the mean of its values.
    The last interval is an exception: every chunk has values at its upper end.
    """
    if settings.levels == "linear":
        return [(16 * m + 1) / settings.top for m in range(MAGNITUDES)]
    if settings.levels == "corner":
        return [expand(16 * m, settings) for m in range(MAGNITUDES)]
    edges = [0.0, *(expand(16 * m - 7.5, settings) for m in range(1, MAGNITUDES)), 1.0]
    levels = [(edges[m] + edges[m + 1]) / 2 for m in range(MAGNITUDES)]
    levels[-1] = edges[-2] + settings.last_level * (edges[-1] - edges[-2])
    return levels


def signed_levels(settings: Log4Settings) -> list[float]:
    """Return the values of the 16 anchor codes, or of the 4 codes of 2-bit anchors in ascending
    order. Codes 8..15 are negative, including the code of magnitude 0."""
    if settings.anchor_bits == 2:
        return [(2 * code - 3) * TWO_BIT_STEP / settings.top for code in range(4)]
    levels = magnitude_levels(settings)
    return [*levels, *(-level for level in levels)]


def refined_value(anchor: int, correction: int, settings: Log4Settings) -> float:
    """Return the value of an anchor code with a correction nibble, in units of the scale.

    Pairs that no encoder produces are decoded too: integers below 0 count as 0.
    """
    negative = anchor >= 8
    magnitude = anchor & 7
    signed_correction = correction - 16 if correction >= 8 else correction
    value = expand(max(16 * magnitude - signed_correction, 0), settings)
    return -value if negative else value
