"""support_triton: the reference backend runs where Triton has no device.

SGLang asks this by backend name before it launches Triton kernels for positions and page tables.
SGLang 0.5.17. Remove when SGLang asks the platform instead of a list of names.
"""

from __future__ import annotations

TARGET = "sglang.srt.utils.common.support_triton"
KIND = "replace"
SCOPE = "cpu"


def hook(backend: str) -> bool:
    return False
