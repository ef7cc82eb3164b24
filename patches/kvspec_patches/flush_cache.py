"""Scheduler.flush_cache: requests that have finished do not keep a server from flushing.

SGLang 0.5.17 drops finished requests when it makes the next batch, after it has received messages.
A message that a client sends as soon as it has its answer may come first. A flush is then refused,
and an update of weights ends the server, although nothing runs.
"""

from __future__ import annotations

from typing import Any


def hook(self: Any, *args: Any, **kwargs: Any) -> None:
    batches = [batch for batch in (self.running_batch, self.last_batch) if batch is not None]
    if all(req.finished() for batch in batches for req in batch.reqs):
        for batch in batches:
            batch.filter_batch()
        # SGLang sets this where it drops requests itself.
        self.running_batch.batch_is_full = False
