"""Lossless long-context serving for SGLang on a low-bit KV cache."""
