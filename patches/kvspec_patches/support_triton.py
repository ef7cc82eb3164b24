"""support_triton: the reference backend runs where Triton has no device.

SGLang calls this function with the name of its attention backend, before it launches Triton kernels
for positions and page tables.
"""

from __future__ import annotations


def hook(backend: str) -> bool:
    return False
