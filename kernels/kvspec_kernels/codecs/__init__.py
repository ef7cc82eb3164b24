"""Codecs, each declared once and without torch: parameters, layouts, and what kernels ask."""

from kvspec_kernels.codecs.fields import FieldSpec, FormatError
from kvspec_kernels.codecs.spec import CodecSpec

__all__ = ["CodecSpec", "FieldSpec", "FormatError"]
