"""Kernel arguments for the full-precision tokens after a request's encoded pages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


class TailArguments(ctypes.Structure):
    """Kernel argument with the layout of Tail in cuda/tail.cuh."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("k", "v")]
        + [
            (f"{part}_{dimension}", ctypes.c_int64)
            for part in ("k", "v")
            for dimension in ("page", "token", "head")
        ]
        + [(name, ctypes.c_void_p) for name in ("indptr", "indices", "lens")]
    )


def tail_arguments(tail: Sequence[torch.Tensor] | None) -> TailArguments:
    """Return the kernel argument for ops/attention_plan.py's Tail; None becomes all zeros."""
    if tail is None:
        return TailArguments()
    k, v, *index = tail
    strides = (*k.stride()[:3], *v.stride()[:3])
    return TailArguments(k.data_ptr(), v.data_ptr(), *strides, *(x.data_ptr() for x in index))
