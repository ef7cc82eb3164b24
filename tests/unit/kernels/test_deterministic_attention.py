"""Deterministic attention: right, and with the same bits however tokens are grouped."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvspec_kernels.ops import deterministic_attention as ops
from kvspec_kernels.ops.attention import Tail
from kvspec_kernels.ops.deterministic_attention import Past, deterministic_attention, num_chunks
from kvspec_kernels.reference.attention import attend
from kvspec_testkit.kernels.comparison import assert_within_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Page size, head size, KV heads, group, dtype.
SHAPES = [
    (64, 64, 2, 4, BF16),
    (64, 128, 1, 7, BF16),
    (32, 96, 2, 1, FP16),
    (16, 256, 1, 16, BF16),
    (64, 80, 1, 3, FP32),
]
# The interpreter takes a minute for the largest shapes. A GPU runs them all.
INTERPRETED = SHAPES if torch.cuda.is_available() else SHAPES[2:4]


def shape_id(shape: tuple) -> str:
    page, head, heads, group, dtype = shape
    return f"page{page}-head{head}-kv{heads}-group{group}-{str(dtype).removeprefix('torch.')}"


class Requests:
    """Random K and V of requests, cut into past and tail at any place. Pools are NaN elsewhere."""

    def __init__(self, shape, lens, device, seed=0):
        self.page, self.head_dim, self.heads, self.group, self.dtype = shape
        self.device = device
        self.rng = torch.Generator().manual_seed(seed)
        self.kv = [self._draw(2, n, self.heads) for n in lens]
        # Factor 3, so that scores spread over many powers of two.
        self.q = [self._draw(n, self.heads * self.group) * 3 for n in lens]

    def _draw(self, *shape):
        drawn = torch.randn((*shape, self.head_dim), generator=self.rng)
        return drawn.to(self.dtype)

    def _pages(self, tokens, by_head):
        """Return tokens [2, n, H, D] as pages [2, N, ...], NaN behind the last token."""
        count = -(-tokens.shape[1] // self.page)
        filled = torch.full((2, count * self.page, *tokens.shape[2:]), torch.nan, dtype=self.dtype)
        filled[:, : tokens.shape[1]] = tokens
        pages = filled.unflatten(1, (count, self.page))
        return pages.transpose(2, 3) if by_head else pages

    def attend(self, calls, max_qo_len=None, *, shared=False):
        """Return the outputs of each call. calls: (request, first query, end, pages in the
        past). shared: programs share the chunks of a request."""
        pasts, tails, lens, queries = [], [], [], []
        for request, first, end, num_past in calls:
            kv = self.kv[request][:, :end]
            pasts.append(self._pages(kv[:, : num_past * self.page], by_head=True))
            tails.append(self._pages(kv[:, num_past * self.page :], by_head=False))
            lens.append(end - num_past * self.page)
            queries.append(self.q[request][first:end])
        past, slots, past_indptr, pages = self._pool(pasts, spare=3)
        tail, tail_slots, tail_indptr, tail_pages = self._pool(tails, spare=2)
        counts = torch.tensor([len(q) for q in queries])
        out = deterministic_attention(
            torch.cat(queries).to(self.device),
            Past(*past, slots, past_indptr, pages),
            Tail(*tail, tail_indptr, tail_slots[tail_pages.long()], self._ints(lens)),
            self._indptr(counts),
            max_qo_len or int(counts.max()),
            parts=self._parts(calls) if shared else None,
        )
        return out.cpu().split(counts.tolist())

    def _parts(self, calls):
        tokens = sum(end - first for _, first, end, _ in calls)
        chunks = max(num_chunks(-(-end // self.page), self.page) for _, _, end, _ in calls)
        shape = (tokens + 1, chunks + 1, self.heads * self.group, self.head_dim + 2)
        return torch.full(shape, torch.nan, device=self.device)

    def _pool(self, parts, spare):
        """Return shuffled pages of all requests: (k, v), slots by page id, indptr, page ids."""
        pages = torch.cat(parts, dim=1)
        count = pages.shape[1]
        pool = torch.full((2, count + spare, *pages.shape[2:]), torch.nan, dtype=self.dtype)
        slots = torch.randperm(count + spare, generator=self.rng)
        pool[:, slots[:count]] = pages
        indptr = self._indptr(torch.tensor([part.shape[1] for part in parts]))
        return pool.to(self.device).unbind(0), self._ints(slots), indptr, self._ints(range(count))

    def _indptr(self, counts):
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(self.device)

    def _ints(self, values):
        return torch.as_tensor(list(values), dtype=torch.int32, device=self.device)

    def reference(self, dtype):
        """Return the outputs of all tokens of all requests, one after the other."""
        outs = []
        for q, kv in zip(self.q, self.kv, strict=True):
            seen = torch.arange(1, len(q) + 1)
            parts = (q.to(dtype), *kv.to(dtype))
            outs.append(attend(*parts, seen, 1 / math.sqrt(self.head_dim))[0].float())
        return torch.cat(outs)


@pytest.fixture(autouse=True)
def a_row_at_a_time(device, monkeypatch):
    """Multiply one row at a time. On a GPU a product's row does not depend on the other rows. In
    Triton's interpreter it may: the BLAS selects a kernel, and so the order of the sum, by the
    row's place and the CPU."""
    if device.type == "cpu":

        def matmul(a, b, dtype):
            b = b.astype(dtype)
            return np.stack([row @ b for row in a.astype(dtype)])

        monkeypatch.setattr(np, "matmul", matmul)


@pytest.fixture(params=[None, 2], ids=["one chunk", "chunks of two pages"])
def chunk(request, monkeypatch):
    """Chunks of a size, in pages."""
    if request.param:
        monkeypatch.setattr(ops, "chunk_blocks", lambda page_size: request.param)


@pytest.mark.parametrize(
    ("shape", "shared"),
    [*((shape, False) for shape in SHAPES), *((shape, True) for shape in INTERPRETED)],
    ids=lambda value: shape_id(value) if isinstance(value, tuple) else "shared" * value,
)
def test_equals_the_reference(shape, device, chunk, shared):
    """Attend whole prompts at once, with pasts of no page, one page and several."""
    page = shape[0]
    lens = [1, 3 * page + 5, page, 2 * page + 1]
    requests = Requests(shape, lens, device)
    calls = [(i, 0, n, 0) for i, n in enumerate(lens)]
    outs = torch.cat(requests.attend(calls, shared=shared))
    finer = torch.float64 if shape[4] == FP32 else FP32
    exact = requests.reference(finer)
    # Half a unit in the last place, since the baseline may have no rounding error by chance.
    floor = torch.finfo(shape[4]).eps / 2 * exact.abs().max().item()
    rows = torch.tensor([0, *lens]).cumsum(0)
    baseline = requests.reference(shape[4])
    assert_within_reference(outs, exact, baseline, rows=rows, floor=floor)


@pytest.mark.parametrize("shape", INTERPRETED, ids=shape_id)
def test_the_same_bits_however_tokens_are_grouped(shape, device, chunk):
    page = shape[0]
    lens = [4 * page + 9, page + 2]
    requests = Requests(shape, lens, device)
    whole = requests.attend([(0, 0, lens[0], 0), (1, 0, lens[1], 0)])
    chunks = requests.attend(
        [(0, 2 * page, 3 * page + 1, 2), (1, 1, page, 0), (0, 3 * page + 1, lens[0], 3)]
    )
    assert torch.equal(chunks[0], whole[0][2 * page : 3 * page + 1])
    assert torch.equal(chunks[1], whole[1][1:page])
    assert torch.equal(chunks[2], whole[0][3 * page + 1 :])
    # Verify over the end of a page, together with another request. Then compute these tokens one at
    # a time, with the page in the past, or still in the tail, in grids of other sizes.
    first = 4 * page - 3
    for shared in (False, True):
        calls = [(1, page, lens[1], 1), (0, first, first + 7, 3)]
        verified = requests.attend(calls, shared=shared)
        assert torch.equal(verified[1], whole[0][first : first + 7])
        for position in range(first, first + 7):
            for num_past in {position // page, 3, 0}:
                call = (0, position, position + 1, num_past)
                one = requests.attend([call], max_qo_len=40, shared=shared)
                assert torch.equal(one[0][0], whole[0][position])


def test_rows_without_a_token(device):
    """CUDA graphs that were captured for more requests have such rows."""
    padded = deterministic_attention(
        torch.zeros(2, 8, 64, dtype=BF16, device=device),
        Past(
            *torch.full((2, 1, 2, 64, 64), torch.nan, dtype=BF16, device=device),
            *(torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 3, 0)),
        ),
        Tail(
            *torch.full((2, 1, 64, 2, 64), torch.nan, dtype=BF16, device=device),
            *(torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 0, 2)),
        ),
        torch.arange(3, dtype=torch.int32, device=device),
        1,
    )
    assert torch.equal(padded, torch.zeros_like(padded))


def test_no_queries(device):
    requests = Requests(SHAPES[0], [3], device)
    assert requests.attend([(0, 3, 3, 0)], max_qo_len=1)[0].shape == (0, 8, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page": 48}, "power of two"),
        ({"dtype": FP16}, "must be torch.float16"),
        ({"heads": 3}, "does not fit 3 KV heads"),
        ({"head_dim": 72}, "multiples of 16 elements"),
        ({"parts": (1, 1, 8, 64)}, r"parts must be \[tokens, chunks, 8, 66\]"),
        ({"parts": (0, 1, 8, 66)}, "room for 1 tokens"),
    ],
)
def test_refuses_what_does_not_fit(change, message, device):
    sizes = {"page": 64, "heads": 2, "head_dim": 64, "dtype": BF16, "parts": None} | change
    page, heads, head_dim = sizes["page"], sizes["heads"], sizes["head_dim"]
    parts = sizes["parts"] and torch.zeros(sizes["parts"], device=device)
    zeros = [torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 2, 0, 2, 0, 1, 2)]
    with pytest.raises(ValueError, match=message):
        deterministic_attention(
            torch.zeros(1, 8, head_dim, dtype=sizes["dtype"], device=device),
            Past(*torch.zeros(2, 1, heads, page, head_dim, dtype=BF16, device=device), *zeros[:3]),
            Tail(*torch.zeros(2, 1, page, heads, head_dim, dtype=BF16, device=device), *zeros[3:6]),
            zeros[6],
            1,
            parts=parts,
        )
