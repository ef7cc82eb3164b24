"""Streams of a GPU that show whether a fence is missing: slow ones, and ones that ignore fences."""

from __future__ import annotations

import torch

from sglang_kvspec.kv.copy_streams import CudaStream, Event

# About 10 ms, many times the copy of a page of 1 MiB.
SPIN_CYCLES = 20_000_000


def spin(stream: CudaStream) -> None:
    """Delay the work that the stream is given after this call, by a kernel that only spins."""
    with torch.cuda.stream(stream.stream):
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]


class DeafStream(CudaStream):
    """Stream that ignores fences."""

    def wait(self, event: Event) -> None:
        pass
