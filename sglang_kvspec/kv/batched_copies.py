"""Many copies between a GPU and pinned memory in one call of CUDA's runtime.

For 500 separate pages of 2 MiB on an H200, one call reaches 54 GB/s, and a call for each page
reaches 46. One call takes a tenth of the CPU's time.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence

import torch

logger = logging.getLogger(__name__)

# CUDA's major version. Older runtimes have cudaMemcpyBatchAsync with other arguments, or lack it.
CUDA_MAJOR = 13
# cudaMemcpySrcAccessOrderStream: a source is read in stream order.
_IN_STREAM_ORDER = 1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes. The two location hints are for managed memory, and not used here."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def copy_rows_at_once(
    target: torch.Tensor,
    target_rows: Sequence[int],
    source: torch.Tensor,
    source_rows: Sequence[int],
    stream: torch.cuda.Stream,
) -> bool:
    """Copy target[target_rows[i]] = source[source_rows[i]] on a stream that is not the default one.
    One tensor is in pinned memory, both are contiguous, with rows of one shape and dtype, and
    target_rows are distinct. Return False, and copy nothing, if the CUDA runtime lacks the call.
    Raises RuntimeError if the call fails."""
    runtime = _runtime()
    if runtime is None:
        return False
    count, row_bytes = len(target_rows), target[0].nbytes
    places = torch.tensor([list(target_rows), list(source_rows)], dtype=torch.int64)
    # The call takes plain addresses, so check here what slices would check.
    assert target.is_contiguous(), "the target must be contiguous"
    assert source.is_contiguous(), "the source must be contiguous"
    assert target.shape[1:] == source.shape[1:], "rows of target and source must have equal shapes"
    assert target.dtype == source.dtype, "rows of target and source must have equal dtypes"
    assert int(places.min()) >= 0, "row numbers must be at least 0"
    assert all(int(rows.max()) < len(of) for rows, of in zip(places, (target, source), strict=True))
    places *= row_bytes
    places += torch.tensor([[target.data_ptr()], [source.data_ptr()]])
    sizes = torch.full((count,), row_bytes, dtype=torch.int64)
    attributes = _Attributes(source_access_order=_IN_STREAM_ORDER)
    first_with_them = ctypes.c_size_t(0)
    status = runtime.cudaMemcpyBatchAsync(
        ctypes.c_void_p(places[0].data_ptr()),
        ctypes.c_void_p(places[1].data_ptr()),
        ctypes.c_void_p(sizes.data_ptr()),
        ctypes.c_size_t(count),
        ctypes.byref(attributes),
        ctypes.byref(first_with_them),
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream.cuda_stream),
    )
    if status:
        raise RuntimeError(f"copying {count} pages of residuals failed with CUDA error {status}")
    return True


@functools.lru_cache
def _runtime() -> ctypes.CDLL | None:
    version = torch.version.cuda or ""
    if version.split(".")[0] != str(CUDA_MAJOR):
        logger.warning(
            "KVSpec: batched copies need CUDA %s, PyTorch has CUDA %s: pages of residuals are "
            "copied one by one",
            CUDA_MAJOR,
            version,
        )
        return None
    # PyTorch has loaded this library already.
    return ctypes.CDLL(f"libcudart.so.{CUDA_MAJOR}")
