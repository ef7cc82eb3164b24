"""A flush does not wait for SGLang to drop requests that have finished, and for no others."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from kvspec_patches import flush_cache


@dataclass(frozen=True, slots=True)
class Request:
    is_finished: bool

    def finished(self) -> bool:
        return self.is_finished


@dataclass(slots=True)
class Batch:
    reqs: list[Request] = field(default_factory=list)
    batch_is_full: bool = True

    def filter_batch(self) -> None:
        self.reqs = [req for req in self.reqs if not req.finished()]


DONE, RUNS = Request(True), Request(False)


@pytest.mark.parametrize(
    ("running", "last", "left"),
    [
        ([DONE, DONE], [DONE], (0, 0)),
        ([], [DONE], (0, 0)),
        ([DONE, RUNS], [DONE], (2, 1)),
        ([DONE], [RUNS], (1, 1)),
        ([], None, (0, None)),
    ],
)
def test_batches_are_emptied_if_no_request_runs(
    running: list[Request], last: list[Request] | None, left: tuple[int, int | None]
) -> None:
    scheduler = SimpleNamespace(
        running_batch=Batch(list(running)),
        last_batch=None if last is None else Batch(list(last)),
    )
    flush_cache.hook(scheduler, empty_cache=True)
    now = None if scheduler.last_batch is None else len(scheduler.last_batch.reqs)
    assert (len(scheduler.running_batch.reqs), now) == left
    # A full batch without requests would never admit one.
    assert scheduler.running_batch.batch_is_full == (RUNS in running + (last or []))
