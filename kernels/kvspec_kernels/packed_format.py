"""Byte layout of a packed residual record: with its anchor record, every bit of a page's K and V.

An anchor tells most of a value's sign and exponent. What it does not tell takes 7 to 8 bits in bf16
instead of 16. How many bits a value gets follows from the anchor alone, so nothing is stored about
widths. One record holds K and V of one page and KV head, as the other records do (formats.py).

    packed residual record, target exact
    +----------+----------------------+-------+
    | fits     | 1, or 0              | uint16|
    | unused   | zero                 | uint16|
    | k_starts | [segments]           | uint16|  first word of each segment in the body
    | v_starts | [segments]           | uint16|
    | body     | [body_words]         | uint32|
    +----------+----------------------+-------+

A segment is a group of tiles in the order in which anchors store their codes: 1024 values, 32 in a
row for each lane, or 512 where groups have two tiles. So a warp finds the start of each lane by
one prefix sum over the widths of its lanes. In a segment, the codes of its values follow each
other from the lowest bit of the first word on. Then, from the next multiple of 16 bits on, come
the raw 16 bits of each value that escaped, in the order of the values. The next segment begins at
the next word.

A record has room for BODY_BITS an element. A page of a KV head that needs more does not fit. Its
record then holds K as raw bits, and V is kept elsewhere, as raw bits too:

    +----------+----------------------+-------+
    | fits     | 0                    | uint16|
    | unused   | zero                 | uint16|
    | unused   | [12], zero           | uint8 |
    | k_bits   | [P, D] row-major     | KV    |
    | unused   | zero                 | dtype |
    +----------+----------------------+-------+

Numbers of a value x of 16 bits, with anchor value a (as drafts read it, rounded to the KV dtype)
and scale s of its group:

    ord(x)    the bits of x as a signed integer, with all but the sign flipped if x is negative:
              its place among all numbers in order. A one-to-one map of all 65536 patterns
    steps     (fp32 bits of |a|) >> 22, minus (fp32 bits of s) >> 22: by how many half octaves |a|
              is above s, from exponents and first bits of mantissas
    top       the largest magnitude bits with the exponent of s, in the KV dtype: for fp16 the
              exponent less 112, and at least 0; at most 0x7FFF
    w         width(steps); m is 2^(w-1) - 1

The code of a value has w bits:

    far       steps >= NEAR_ZERO: ord(x) - ord(a) + m, if the difference is from -m to m
    near      otherwise: (distance << 1) | sign, with distance = top - magnitude bits of x, if it is
              from 0 to m - 1. Nearer to zero than about half a scale, the anchor leaves sign and
              exponent of x open
    escape    all ones, for any other x

Where a or s is not finite, the rule is `near`: it does not use a, whose NaN bits differ between
devices.

All of this is integer arithmetic on bits that every device computes alike: a is a product of at
most 12 bits of mantissa, exact in fp32, one rounded addition, and one rounding to the KV dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvspec_kernels.codecs import packed_sizes
from kvspec_kernels.codecs.fields import FormatError
from kvspec_kernels.formats import check_sizes

VERSION = 1
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}
# In half octaves: below half of the scale, an anchor says too little about the exponent.
NEAR_ZERO = -2
# Widths beside the bits of the mantissa. A near code reaches 8 octaves below the scale.
NEAR_BITS, FIRST_BITS, FAR_BITS = 4, 1, -4
# From here on, widths stay the same.
LAST_STEP = 2 * (FIRST_BITS - FAR_BITS)
ESCAPE_BITS = 16
# Where K begins in a record that does not fit.
RAW_OFFSET = 16


def code_width(steps: int, mantissa_bits: int) -> int:
    """Return the bits of a code. steps: as in this module's docstring."""
    if steps < NEAR_ZERO:
        return mantissa_bits + NEAR_BITS
    if steps < 0:
        # Where |a| is below the scale, an error can change the exponent.
        return mantissa_bits + FIRST_BITS - steps
    return mantissa_bits + max(FIRST_BITS - steps // 2, FAR_BITS)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Sizes of a record. num_segments: of K, and as many of V."""

    page_size: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_sizes(self.page_size, self.head_dim)
        if self.dtype not in MANTISSA_BITS:
            raise FormatError(f"packed residuals need a KV cache in bf16 or fp16, got {self.dtype}")

    @property
    def mantissa_bits(self) -> int:
        return MANTISSA_BITS[self.dtype]

    @property
    def num_values(self) -> int:
        """Values of K, and as many of V."""
        return self.page_size * self.head_dim

    @property
    def segment_values(self) -> int:
        return packed_sizes.segment_values(self.num_values)

    @property
    def num_segments(self) -> int:
        return self.num_values // self.segment_values

    @property
    def body_offset(self) -> int:
        """Offset of the body in bytes, a multiple of 4."""
        return packed_sizes.body_offset(self.num_values)

    @property
    def body_words(self) -> int:
        return (self.nbytes - self.body_offset) // 4

    @property
    def raw_nbytes(self) -> int:
        """Bytes of K as it is, and of V: what a record that does not fit leaves elsewhere."""
        return self.num_values * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return packed_sizes.record_bytes(self.num_values, self.mantissa_bits)

    @property
    def bits_per_element(self) -> float:
        return 8 * self.nbytes / (2 * self.num_values)
