"""SchedulerWeightUpdaterManager.begin_weight_update: tells the worker before weights change.

Since SGLang 0.5.21 a session encloses updates. Another process may write weights into memory during
a session, of which SGLang hears nothing.
"""

from __future__ import annotations

from typing import Any


def hook(self: Any, recv_req: Any) -> None:
    self.draft_worker.weights_will_change()
