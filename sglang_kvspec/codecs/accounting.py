"""What encoded pages cost in bits and bytes, padding and metadata included."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvspec_kernels.formats import RecordLayout, residual_layout
from sglang_kvspec.codecs.base import Codec


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of one token in one layer, K and V of all KV heads together. Fractions, because a
    page's metadata need not divide by its tokens; multiply by the page size for whole bytes."""

    anchor: Fraction
    residual_int8: Fraction
    residual_exact: Fraction
    plain: Fraction


def bits_per_element(layout: RecordLayout, page_size: int, head_dim: int) -> float:
    """Bits that a record spends on each of the K and V elements of its page."""
    return layout.nbytes * 8 / (2 * page_size * head_dim)


def token_bytes(codec: Codec, num_kv_heads: int) -> TokenBytes:
    """Bytes per token and layer of `codec`'s records and of a cache without any codec."""
    per_record = Fraction(num_kv_heads, codec.page_size)
    sizes = (codec.page_size, codec.head_dim, codec.dtype)
    return TokenBytes(
        anchor=codec.anchor_bytes * per_record,
        residual_int8=residual_layout(codec.settings, "int8", *sizes).nbytes * per_record,
        residual_exact=residual_layout(codec.settings, "exact", *sizes).nbytes * per_record,
        plain=Fraction(2 * num_kv_heads * codec.head_dim * codec.dtype.itemsize),
    )
