"""Which kernels servers have compiled so far, from the caches that compilers keep on disk."""

from __future__ import annotations

import os
from pathlib import Path


def compiled_kernels() -> frozenset[Path]:
    """Files of kernels in the caches of Triton and FlashInfer. Of this machine: a kernel that
    another server has compiled before is in them, and one being compiled beside this counts."""
    home = Path.home()
    triton = Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))
    workspace = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", home))
    flashinfer = workspace / ".cache" / "flashinfer"
    return frozenset((*triton.glob("*/*.cubin"), *flashinfer.rglob("*.so")))


def names(kernels: frozenset[Path]) -> list[str]:
    """As their sources call them, in order; one compiled for several arguments comes as often."""
    return sorted(path.stem for path in kernels)
