"""Kernels that servers have compiled so far, from the compilers' caches on disk."""

from __future__ import annotations

import os
from pathlib import Path


def compiled_kernels() -> frozenset[Path]:
    """Return the files of kernels in this machine's caches of Triton and FlashInfer. Kernels that
    other servers compiled before, or compile at the same time, are included."""
    home = Path.home()
    triton = Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))
    workspace = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", home))
    flashinfer = workspace / ".cache" / "flashinfer"
    return frozenset((*triton.glob("*/*.cubin"), *flashinfer.rglob("*.so")))


def names(kernels: frozenset[Path]) -> list[str]:
    """Return the names of kernels as in their sources, sorted. A kernel compiled for several sets
    of arguments appears once for each."""
    return sorted(path.stem for path in kernels)
