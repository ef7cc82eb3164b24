"""The closed lists of transfer backends and their classes, to which KVSpec adds its own."""

from __future__ import annotations

from sglang.srt.disaggregation.utils import (
    FAKE_BOOTSTRAP_HOST,
    DisaggregationMode,
    KVClassType,
    TransferBackend,
)

__all__ = ["FAKE_BOOTSTRAP_HOST", "DisaggregationMode", "KVClassType", "TransferBackend"]
