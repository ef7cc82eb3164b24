"""Tests of captures of CUDA graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvspec_kernels.ops.capture import captured_graph


class Captures:
    """Stand-in for torch.cuda.graph that notes whether garbage is collected while it captures."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.collected: list[bool] = []

    @contextmanager
    def __call__(self, graph: object, **options: Any) -> Iterator[None]:
        self.options = options
        self.collected.append(gc.isenabled())
        yield
        self.collected.append(gc.isenabled())


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    stand_in = Captures()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", stand_in)
    return stand_in


@pytest.fixture(params=[True, False], ids=["collector on", "collector off"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_no_garbage_is_collected_during_a_capture(captures: Captures, collects: bool) -> None:
    with captured_graph(pool="pool", stream="stream"):
        assert not gc.isenabled()
    assert captures.collected == [False, False]
    assert captures.options == {"pool": "pool", "stream": "stream"}
    assert gc.isenabled() == collects


def test_a_failed_capture_leaves_the_collector_as_it_was(
    captures: Captures, collects: bool
) -> None:
    with pytest.raises(ZeroDivisionError), captured_graph():
        _ = 1 / 0
    assert gc.isenabled() == collects


class Pinned:
    """Pinned memory in a cycle of references, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.memory, self.itself = torch.empty(2**20, dtype=torch.uint8), self
        runtime, address = torch.cuda.cudart(), self.memory.data_ptr()
        assert int(runtime.cudaHostRegister(address, self.memory.nbytes, 0)) == 0
        weakref.finalize(self, runtime.cudaHostUnregister, address)


@pytest.mark.gpu
def test_pinned_memory_among_the_garbage_does_not_end_a_capture(device: torch.device) -> None:
    numbers = torch.zeros(4, device=device)
    gc.collect()
    lost = weakref.ref(Pinned())
    with captured_graph() as graph:
        numbers.add_(1)
        # So many new objects start the collector, if it is on.
        _kept = [[] for _ in range(100 * gc.get_threshold()[0])]
        assert lost() is not None
    graph.replay()
    assert numbers.tolist() == [1.0] * 4
    gc.collect()
    assert lost() is None
