"""Codecs of KV pages for the baseline modes of --kvspec-transfer; see README.md."""

from sglang_kvspec.codecs.wire.base import KV, PageGeometry, WireCodec
from sglang_kvspec.codecs.wire.registry import WireCodecName, make_wire_codec

__all__ = ["KV", "PageGeometry", "WireCodec", "WireCodecName", "make_wire_codec"]
