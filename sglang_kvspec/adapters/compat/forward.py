"""Batches and contexts of the model forward, which KVSpec builds for captured graphs."""

from __future__ import annotations

from sglang.srt.layers.dp_attention import DpPaddingMode, set_dp_buffer_len, set_is_extend_in_batch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

__all__ = [
    "CaptureHiddenMode",
    "DpPaddingMode",
    "ForwardBatch",
    "ForwardContext",
    "ForwardMode",
    "forward_context",
    "set_dp_buffer_len",
    "set_is_extend_in_batch",
]
