"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured_graph(
    pool: Any | None = None, stream: torch.cuda.Stream | None = None
) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what is enqueued in this context into a graph. pool, stream: as of torch.cuda.graph.

    Garbage is not collected meanwhile. It may hold graphs or pinned memory, and CUDA does not allow
    to free these during a capture: the capture fails, and the memory stays pinned.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            yield graph
    finally:
        if collects:
            gc.enable()
