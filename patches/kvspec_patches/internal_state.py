"""Scheduler.get_internal_state: adds the `kvspec` section to /server_info.

SGLang 0.5.17. Remove when speculative workers can report state.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
KIND = "after"
SCOPE = "kvspec"


def hook(result: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    report = getattr(self.draft_worker, "kvspec_report", None)
    if report is not None:
        result.internal_state["kvspec"] = report()
    return result
