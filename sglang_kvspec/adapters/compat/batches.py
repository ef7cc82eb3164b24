"""Results of a batch, which the scheduler expects of a worker."""

from __future__ import annotations

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

__all__ = ["GenerationBatchResult", "LogitsProcessorOutput"]
