"""Relay of tokens between overlapped batches, which every speculative algorithm must make."""

from __future__ import annotations

from sglang.srt.managers.overlap_utils import FutureMap

__all__ = ["FutureMap"]
