"""SchedulerWeightUpdaterManager._observe_weight_load: tells the worker before weights change.

SGLang 0.5.17 opens this context around every kind of update. It does not tell the draft worker of a
distributed update. It may leave the draft worker out of an update from tensors. Of the other
updates it tells the draft worker after the weights have changed.
"""

from __future__ import annotations

from typing import Any


def hook(self: Any, source: str) -> None:
    self.draft_worker.weights_will_change()
