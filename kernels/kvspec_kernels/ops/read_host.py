"""Few bytes from pinned host memory, past the copy engine."""

from __future__ import annotations

import ctypes
import functools

import torch

from kvspec_kernels.jit import nvrtc

WORD_BYTES = 4
BLOCK_THREADS = 256
# More would take multiprocessors from others without being quicker.
MAX_BLOCKS = 32


@functools.lru_cache
def _kernel(device: torch.device) -> nvrtc.Kernel:
    (kernel,) = nvrtc.load("read_host.cu", ["read_host"], {}, device)
    return kernel


def read_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """target[...] = source on the current stream of target's device, in place. The CPU does not
    wait: source must not be changed before the device has read it.

    target: contiguous, on a CUDA device. source: pinned and contiguous, of as many bytes, a
    multiple of 4. Raises ValueError for others.
    """
    if target.device.type != "cuda" or not source.is_pinned():
        raise ValueError(f"target must be on a GPU and source pinned: {target.device}")
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError("target and source must be contiguous")
    if target.nbytes != source.nbytes or target.nbytes % WORD_BYTES:
        raise ValueError(
            f"target and source must be of as many bytes, whole words of {WORD_BYTES}, not "
            f"{target.nbytes} and {source.nbytes}"
        )
    num_words = target.nbytes // WORD_BYTES
    if not num_words:
        return
    grid = min(-(-num_words // BLOCK_THREADS), MAX_BLOCKS)
    arguments = (target, source, ctypes.c_longlong(num_words))
    _kernel(target.device).launch(grid, BLOCK_THREADS, arguments)
