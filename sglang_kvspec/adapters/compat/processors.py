"""NUMA nodes of a machine, by which SGLang divides host memory among ranks."""

from __future__ import annotations

from sglang.srt.utils.common import get_cpu_ids_by_node

__all__ = ["get_cpu_ids_by_node"]
