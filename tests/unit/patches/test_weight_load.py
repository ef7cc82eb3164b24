"""Weight updates: SGLang announces each, and the worker cancels the work and the pages of the old
weights."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from kvspec_patches import weight_load, weight_session, weight_session_end
from sglang_kvspec.adapters.worker import KVSpecWorker


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def worker(told: list[str]) -> Any:
    """A worker with a pre-launched round, which records the parts that it notifies of new
    weights."""
    worker = object.__new__(KVSpecWorker)
    tiers, disaggregation, copies = (
        SimpleNamespace(weights_will_change=lambda name=name: told.append(name))
        for name in ("prefix tiers", "disaggregation", "draft weights")
    )
    worker.parts = SimpleNamespace(
        pool=SimpleNamespace(prefix_tiers=tiers),
        disaggregation=disaggregation,
        draft_weights=copies,
    )
    overlap = SimpleNamespace(cancel=lambda: told.append("overlap"))
    worker.loop = SimpleNamespace(overlap=overlap)
    return worker


@pytest.mark.parametrize("source", ["distributed", "disk"])
def test_new_weights_end_the_round_and_the_use_of_other_tiers(
    worker: Any, told: list[str], source: str
) -> None:
    weight_load.hook(SimpleNamespace(draft_worker=worker), source)
    assert sorted(told) == ["disaggregation", "draft weights", "overlap", "prefix tiers"]


def test_new_weights_end_the_round_of_a_server_without_other_tiers(
    worker: Any, told: list[str]
) -> None:
    worker.parts = SimpleNamespace(
        pool=SimpleNamespace(prefix_tiers=None), disaggregation=None, draft_weights=None
    )
    weight_load.hook(SimpleNamespace(draft_worker=worker), "distributed")
    assert told == ["overlap"]


@pytest.mark.parametrize("module", [weight_session, weight_session_end])
def test_a_session_of_updates_is_announced(worker: Any, told: list[str], module: Any) -> None:
    module.hook(SimpleNamespace(draft_worker=worker), None)
    assert sorted(told) == ["disaggregation", "draft weights", "overlap", "prefix tiers"]


def test_every_update_of_weights_is_announced() -> None:
    updates = [
        method
        for name, method in inspect.getmembers(SchedulerWeightUpdaterManager)
        if name.startswith("update_weights_from_")
    ]
    assert len(updates) >= 4
    for update in updates:
        assert "with self._observe_weight_load(" in inspect.getsource(update)
