"""Scheduler.get_internal_state: adds the `kvspec` section to /server_info."""

from __future__ import annotations

from typing import Any


def hook(result: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    report = getattr(self.draft_worker, "kvspec_report", None)
    if report is not None:
        result.internal_state["kvspec"] = report()
    return result
