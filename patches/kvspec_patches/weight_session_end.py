"""SchedulerWeightUpdaterManager.end_weight_update: cancels a round that began in the session.

SGLang 0.5.21 finishes new weights here, also those that another process wrote into memory.
"""

from __future__ import annotations

from typing import Any


def hook(self: Any, recv_req: Any) -> None:
    self.draft_worker.weights_will_change()
