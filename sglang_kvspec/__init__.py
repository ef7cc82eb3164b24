"""Lossless long-context serving for SGLang on a low-bit KV cache."""

__version__ = "0.1.0"
