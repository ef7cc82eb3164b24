"""Deterministic attention over 8-bit pages: right, and with the same bits however queries are
grouped."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from triton.runtime import interpreter

from kvspec_kernels.formats import Log4Settings, Uniform4Settings
from kvspec_kernels.jit import chunks, cuda_verify
from kvspec_testkit.kernels.cases import make_case, results_for
from kvspec_testkit.kernels.interpreter import dot_by_rows

PAGE, CHUNK = 64, 128
# Past pages and tokens of the tail, all of which are queries. Chunks have two pages: the requests
# have three chunks, one whole chunk, a single page, and two chunks of which one is the tail alone.
PASTS, TAILS = (5, 1, 0, 2), (40, 64, 33, 21)
# Codec, head size, KV heads, group, dtype.
SHAPES = [
    (Uniform4Settings, 128, 1, 4, torch.bfloat16),
    (Log4Settings, 64, 2, 3, torch.float16),
    (Uniform4Settings, 256, 1, 2, torch.bfloat16),
    (Uniform4Settings, 96, 1, 1, torch.bfloat16),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
# The interpreter takes a minute for the largest shapes, and computes each product row by row in any
# case. A GPU runs them all.
GROUPED = SHAPES if torch.cuda.is_available() else SHAPES[3:]


@pytest.fixture(autouse=True)
def rows_by_themselves(monkeypatch):
    """Rows of a product do not depend on each other in the interpreter either."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_by_rows)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    set_chunk(monkeypatch, CHUNK)
    yield
    cuda_verify._verify_kernel.cache_clear()


def set_chunk(monkeypatch, tokens):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", tokens)
    cuda_verify._verify_kernel.cache_clear()


def case_of(shape, device):
    codec, head_dim, heads, group, dtype = shape
    return make_case(
        [pages * PAGE for pages in PASTS],
        settings=codec.for_page(PAGE),
        source="int8",
        page_size=PAGE,
        head_dim=head_dim,
        num_kv_heads=heads,
        group=group,
        dtype=dtype,
        q_lens=TAILS,
        tail_lens=TAILS,
        device=device,
    )


def grouped(case, calls):
    """Return the case of some of its queries. calls: (request, first query, end) of each part,
    which sees the tail up to its last query."""

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=case.q.device)

    def ends(counts):
        return ints([0, *torch.tensor(counts).cumsum(0).tolist()])

    requests = [request for request, _, _ in calls]
    begins = [sum(TAILS[:request]) for request in requests]
    return dataclasses.replace(
        case,
        q=torch.cat(
            [case.q[begin + a : begin + b] for begin, (_, a, b) in zip(begins, calls, strict=True)]
        ),
        qo_indptr=ends([b - a for _, a, b in calls]),
        indptr=ends([PASTS[request] for request in requests]),
        indices=torch.cat([case.pages[request] for request in requests]).int(),
        last_page_len=ints([PAGE if PASTS[request] else 0 for request in requests]),
        tail=case.tail._replace(
            indptr=ends([1] * len(calls)),
            indices=torch.cat([case.tail.indices[request, None] for request in requests]),
            lens=ints([b for _, _, b in calls]),
        ),
    )


@pytest.fixture
def attend(prepare):
    """Return a function that returns the rows of each call, and their lse."""

    def attended(case, calls, sm_scale=3.0):
        part = grouped(case, calls)
        out, lse = results_for(part)
        # Maxima differ so much at this scale that they rise in many pages, and not in all rows.
        pages = len(part.indices) + len(calls)
        prepare(part, deterministic_pages=pages, sm_scale=sm_scale)(out, lse)
        counts = part.qo_indptr.diff().tolist()
        return list(zip(out.cpu().split(counts), lse.cpu().split(counts), strict=True))

    return attended


@shapes
def test_agrees_with_the_reference(shape, check, device):
    case = case_of(shape, device)
    check(case, deterministic_pages=sum(PASTS) + len(TAILS))


@pytest.mark.parametrize("shape", GROUPED, ids=str)
def test_bits_do_not_depend_on_the_grouping(shape, attend, device):
    case = case_of(shape, device)
    every = [(request, 0, count) for request, count in enumerate(TAILS)]
    want = attend(case, every)
    groupings = (
        [[(request, 0, count)] for request, count in enumerate(TAILS)]
        + [
            # One query at a time, of all requests.
            [(request, place, place + 1) for request in range(len(TAILS))]
            for place in (0, 7, 20)
        ]
        + [
            [(0, 0, 13), (1, 50, 64), (2, 32, 33), (0, 13, 30), (3, 1, 2), (0, 30, 40)],
            # The same request many times, as requests with a common prefix.
            [(0, place, place + 5) for place in range(0, 40, 5)] * 3,
        ]
    )
    for calls in groupings:
        for (request, first, end), rows in zip(calls, attend(case, calls), strict=True):
            for part, whole in zip(rows, want[request], strict=True):
                assert torch.equal(part, whole[first:end]), (calls, request, first)


def test_bits_would_tell_another_order(attend, device, monkeypatch):
    """The comparison above notices sums in another order."""
    case = case_of(SHAPES[0], device)
    calls = [(0, 0, 40)]
    ((out, _),) = attend(case, calls, sm_scale=0.1)
    set_chunk(monkeypatch, 4096)
    ((other, _),) = attend(case, calls, sm_scale=0.1)
    assert not torch.equal(out, other)
    assert torch.allclose(out.float(), other.float(), rtol=0.02, atol=0.02)
