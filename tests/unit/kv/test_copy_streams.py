"""Pages copied in one call, or run by run where CUDA's runtime has none for that."""

from __future__ import annotations

import ctypes
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.kv import batched_copies
from sglang_kvspec.kv.batched_copies import copy_rows_at_once
from sglang_kvspec.kv.copy_streams import CudaStream, SyncStream, runs_of

CPU = torch.device("cpu")


class FakeStream:
    cuda_stream = 77


class FakeRuntime:
    """Copies as CUDA's runtime would, of memory on the CPU."""

    def __init__(self, status=0):
        self.status, self.calls = status, []

    def cudaMemcpyBatchAsync(self, targets, sources, sizes, count, attributes, firsts, num, stream):
        count = count.value
        self.calls.append((count, num.value, stream.value))
        assert attributes._obj.source_access_order == 1
        assert firsts._obj.value == 0
        lists = [ctypes.cast(p, ctypes.POINTER(ctypes.c_uint64)) for p in (targets, sources, sizes)]
        for to, origin, size in zip(*(each[:count] for each in lists), strict=True):
            ctypes.memmove(to, origin, size)
        return self.status


class StreamWithoutGpu(CudaStream):
    """CudaStream on the CPU: copies happen at once, and `sizes` holds the rows of each."""

    def __init__(self):
        super().__init__(CPU)
        self.sizes = []

    @property
    def stream(self):
        return FakeStream()

    def copy(self, copies):
        self.sizes += [len(target) for target, _ in copies]
        SyncStream().copy(copies)


@pytest.fixture
def runtime(monkeypatch):
    """Sets the runtime that copies find, None for one that is too old."""

    def use(fake):
        monkeypatch.setattr(batched_copies, "_runtime", lambda: fake)
        return fake

    return use


def rows(count, seed):
    shape = (count, 3, 2, 8)
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=made, dtype=torch.uint8)


@pytest.mark.parametrize("fake", [FakeRuntime(), None])
def test_rows_and_nothing_else(runtime, fake):
    runtime(fake)
    target, source, stream = rows(9, 1), rows(7, 2), StreamWithoutGpu()
    want, to, origin = target.clone(), [4, 0, 5, 6], [2, 6, 3, 4]
    want[to] = source[origin]
    stream.copy_pages(target, to, source, origin)
    assert torch.equal(target, want)
    assert stream.sizes == ([1, 3] if fake is None else [])
    assert fake is None or fake.calls == [(4, 1, FakeStream.cuda_stream)]


def test_a_runtime_that_refuses_is_not_passed_over(runtime):
    runtime(FakeRuntime(status=1))
    with pytest.raises(RuntimeError, match=r"2 pages .* CUDA error 1"):
        copy_rows_at_once(rows(2, 1), [0, 1], rows(2, 2), [1, 0], FakeStream())


@pytest.mark.parametrize(
    ("to", "origin"), [([0, 2], [0, 1]), ([0, 1], [0, 3]), ([-1, 0], [0, 1]), ([0, 1], [-1, 0])]
)
def test_rows_that_are_not_there_are_not_copied(runtime, to, origin):
    fake = runtime(FakeRuntime())
    with pytest.raises(AssertionError):
        copy_rows_at_once(rows(2, 1), to, rows(3, 2), origin, FakeStream())
    assert not fake.calls


def test_rows_that_lie_apart_or_differ_are_not_copied(runtime):
    fake = runtime(FakeRuntime())
    whole = rows(4, 1)
    for target in (whole[::2], whole[:, 1:], whole.view(torch.int32)):
        with pytest.raises(AssertionError):
            copy_rows_at_once(target, [0], rows(4, 2), [0], FakeStream())
    assert not fake.calls


@pytest.mark.parametrize("version", ["12.9", None])
def test_another_cuda_is_told_of_once(monkeypatch, caplog, version):
    batched_copies._runtime.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", version)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not copy_rows_at_once(rows(1, 1), [0], rows(1, 2), [0], FakeStream())
    batched_copies._runtime.cache_clear()
    assert caplog.text.count("one by one") == 1


pairs_of_rows = st.lists(st.integers(0, 30), unique=True).flatmap(
    lambda ones: st.tuples(
        st.just(ones),
        st.lists(st.integers(0, 30), unique=True, min_size=len(ones), max_size=len(ones)),
    )
)


@given(pairs_of_rows)
def test_runs_are_the_longest_that_there_are(both):
    pairs = set(zip(*both, strict=True))
    runs = list(runs_of(pairs))
    found = [(one + i, other + i) for one, other, count in runs for i in range(count)]
    assert sorted(found) == sorted(pairs)
    assert not any((one + n, other + n) in pairs for one, other, n in runs)
