"""Codecs split pages of K and V into an anchor and a residual; see base.Codec."""

from sglang_kvspec.codecs.base import Codec, EncodedPages
from sglang_kvspec.codecs.registry import find_codec, make_codec

__all__ = ["Codec", "EncodedPages", "find_codec", "make_codec"]
