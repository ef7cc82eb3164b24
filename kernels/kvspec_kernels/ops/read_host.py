"""Copy a few bytes from pinned host memory, without the copy engine."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from kvspec_kernels.jit import nvrtc

WORD_BYTES = 4
# Parts that one launch reads.
MAX_PARTS = 16
DEFINES = {"KVSPEC_PARTS": MAX_PARTS}
BLOCK_THREADS = 256
# Blocks of one part. More would occupy multiprocessors without being faster.
MAX_BLOCKS = 32


class _Parts(ctypes.Structure):
    """Kernel argument with the layout of Parts in cuda/read_host.cu."""

    _fields_ = (
        ("target", ctypes.c_void_p * MAX_PARTS),
        ("source", ctypes.c_void_p * MAX_PARTS),
        ("num_words", ctypes.c_uint * MAX_PARTS),
        ("count", ctypes.c_uint),
    )


@functools.lru_cache
def _kernel(device: torch.device) -> nvrtc.Kernel:
    (kernel,) = nvrtc.load("read_host.cu", ["read_host"], DEFINES, device)
    return kernel


def read_host(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source into its target, in place, on the current stream of the targets' device. The
    CPU does not wait: do not change a source before the device has read it.

    parts: pairs (target, source). target: contiguous, all on one CUDA device. source: pinned and
    contiguous, of as many bytes as its target. Both begin at multiples of 4 bytes, and their size
    is a multiple of 4 bytes. Raises ValueError for other tensors.
    """
    # PyTorch never reports an empty tensor as pinned.
    some = [(target, source) for target, source in parts if target.nbytes or source.nbytes]
    if not some:
        return
    device = some[0][0].device
    for target, source in some:
        if target.device.type != "cuda" or not source.is_pinned():
            raise ValueError(
                f"target must be on a GPU and source pinned, got target on {target.device} and "
                f"source on {source.device}, pinned: {source.is_pinned()}"
            )
        if target.device != device:
            raise ValueError(f"targets must be on one device, got {device} and {target.device}")
        if not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError("target and source must be contiguous")
        if target.nbytes != source.nbytes or target.nbytes % WORD_BYTES:
            raise ValueError(
                f"target and source must have equal sizes, in whole words of {WORD_BYTES} bytes, "
                f"got {target.nbytes} and {source.nbytes} bytes"
            )
        if target.data_ptr() % WORD_BYTES or source.data_ptr() % WORD_BYTES:
            raise ValueError(f"target and source must start at multiples of {WORD_BYTES} bytes")
    with torch.cuda.device(device):
        for first in range(0, len(some), MAX_PARTS):
            _launch(some[first : first + MAX_PARTS])


def _launch(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    told = _Parts(count=len(parts))
    for i, (target, source) in enumerate(parts):
        told.target[i], told.source[i] = target.data_ptr(), source.data_ptr()
        told.num_words[i] = target.nbytes // WORD_BYTES
    most_words = max(target.nbytes for target, _ in parts) // WORD_BYTES
    blocks_each = min(-(-most_words // BLOCK_THREADS), MAX_BLOCKS)
    _kernel(parts[0][0].device).launch(blocks_each * len(parts), BLOCK_THREADS, (told,))
