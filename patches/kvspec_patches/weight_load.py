"""SchedulerWeightUpdaterManager._observe_weight_load: tells the worker before weights change.

SGLang 0.5.17 opens this context around every kind of update. Of an update from other processes it
tells no draft worker, of one from tensors only if asked to, and of the others after the fact.
"""

from __future__ import annotations

from typing import Any


def hook(self: Any, source: str) -> None:
    self.draft_worker.weights_will_change()
