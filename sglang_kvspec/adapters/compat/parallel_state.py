"""Groups of ranks, and CUDA-graph capture with their collectives."""

from __future__ import annotations

from sglang.srt.distributed.parallel_state import get_tp_group, get_world_group, graph_capture

__all__ = ["get_tp_group", "get_world_group", "graph_capture"]
