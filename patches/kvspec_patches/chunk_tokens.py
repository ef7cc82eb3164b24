"""SchedulerDisaggregationPrefillMixin.send_kv_chunk: tells the sender how many tokens the last
pages hold.

Until 0.5.16 SGLang gives a sender pages only. Since 0.5.17 it also gives the number of their
tokens, and the last page may be partial.
"""

from __future__ import annotations

from typing import Any


def hook(self: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
    from sglang_kvspec.adapters.transfer.prefill import KVSpecSender

    if last_chunk and isinstance(req.disagg_kv_sender, KVSpecSender):
        end = min(req.extend_range.end, len(req.origin_input_ids)) if end_idx is None else end_idx
        req.disagg_kv_sender.num_last_tokens = end - req.start_send_idx
