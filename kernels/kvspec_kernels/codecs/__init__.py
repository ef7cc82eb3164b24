"""Declarations of codecs, without torch: parameters, layouts and kernel constants."""

from kvspec_kernels.codecs.fields import FieldSpec, FormatError
from kvspec_kernels.codecs.spec import CodecSpec

__all__ = ["CodecSpec", "FieldSpec", "FormatError"]
