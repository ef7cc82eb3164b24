"""Base classes of transfer ends: SGLang has no interface for transfer backends of plugins."""

from __future__ import annotations

from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVArgs,
    KVPoll,
    KVTransferMetric,
)
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    KVTransferError,
    PrefillServerInfo,
)

__all__ = [
    "BaseKVManager",
    "BaseKVReceiver",
    "BaseKVSender",
    "CommonKVBootstrapServer",
    "KVArgs",
    "KVPoll",
    "KVTransferError",
    "KVTransferMetric",
    "PrefillServerInfo",
]
