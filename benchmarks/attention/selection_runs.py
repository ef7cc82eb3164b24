"""Scores and selection of pages, and draft attention over the selected pages, on the same
shapes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from attention.kvspec_runs import record_bytes, records, workspace_of
from attention.shapes import HEAD_DIM, KV_HEADS, PAGE_SIZE, QO_HEADS, Shape
from kvspec_kernels.codecs import CodecSpec
from kvspec_kernels.formats import anchor_layout
from kvspec_kernels.ops.attention import DraftAttention
from kvspec_kernels.ops.attention_plan import Backend
from kvspec_kernels.ops.page_selection import PageSelection, ScoredRequests, SelectedLists

LAYERS = 32
BF16 = torch.bfloat16


def key_bytes(settings: CodecSpec) -> int:
    """Return the bytes of the keys of the anchor record of one page and KV head."""
    return anchor_layout(settings, PAGE_SIZE, HEAD_DIM)["v_codes"].offset


def num_listed(shape: Shape, share: float) -> int:
    """Return the number of pages of a request's list that reads this share."""
    return math.ceil(shape.context // PAGE_SIZE * share)


def listed_calls(
    settings: CodecSpec, shape: Shape, share: float, backend: Backend = "auto"
) -> list[Callable[[], object]]:
    """Return calls of draft attention over random lists of pages, one for each KV head."""
    copies = shape.rotations(int(shape.num_pages * share) * KV_HEADS * record_bytes(settings))
    anchors, _ = records(settings, shape.num_pages)
    count = num_listed(shape, share)
    indptr = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * count
    last = torch.full((shape.batch,), PAGE_SIZE, dtype=torch.int32, device="cuda")
    q = torch.randn(shape.batch, QO_HEADS, HEAD_DIM, device="cuda", dtype=BF16)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    workspace = workspace_of(settings, shape, 1, backend=backend, has_lists_by_head=True)

    def lists() -> torch.Tensor:
        """Return lists as a server has them: between those of other layers."""
        every = torch.zeros(shape.batch * count, LAYERS, KV_HEADS, dtype=torch.int32, device="cuda")
        own = torch.rand(shape.batch, KV_HEADS, shape.context // PAGE_SIZE, device="cuda")
        chosen = own.topk(count, dim=-1).indices.sort().values
        first = torch.arange(shape.batch, device="cuda") * (shape.context // PAGE_SIZE)
        pages = (chosen + first[:, None, None]).transpose(1, 2).reshape(-1, KV_HEADS)
        every[:, 1] = pages.int()
        return every[:, 1]

    def call_on(indices: torch.Tensor) -> Callable[[], object]:
        wrapper = DraftAttention(workspace, backend)
        heads = (QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
        wrapper.plan(indptr, indices, last, *heads, settings=settings, q_dtype=BF16)
        return lambda: wrapper.run(q, anchors, out=out, lse=lse)

    return [call_on(lists()) for _ in range(copies)]


class Selecting:
    """One round's selection for the requests of a shape: scores of one layer at a time, and lists
    of all layers."""

    def __init__(self, settings: CodecSpec, shape: Shape, num_queries: int) -> None:
        batch = shape.batch
        self.copies = shape.rotations(shape.num_pages * KV_HEADS * key_bytes(settings))
        self.indptr, self.lists, _ = shape.page_tables(self.copies)
        self.anchors, _ = records(settings, shape.num_pages * self.copies)
        self.q = torch.randn(batch * num_queries, QO_HEADS, HEAD_DIM, device="cuda", dtype=BF16)
        self.selection = PageSelection(
            batch,
            shape.num_pages,
            batch,
            shape.context // PAGE_SIZE,
            LAYERS,
            QO_HEADS,
            KV_HEADS,
            HEAD_DIM,
            PAGE_SIZE,
            num_queries,
            settings=settings,
            q_dtype=BF16,
            device=self.q.device,
        )
        steps = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.queries = (steps * num_queries, torch.full_like(steps, num_queries))
        self.slots, self.zeros = steps, torch.zeros_like(steps)
        self.shape = shape

    def score_calls(self) -> list[Callable[[], object]]:
        """Return calls that score one layer."""

        def call_on(pages: torch.Tensor) -> Callable[[], object]:
            given = ScoredRequests(self.indptr, pages, *self.queries, self.slots, self.zeros)
            return lambda: self.selection.score(0, self.q, self.anchors, given)

        return [call_on(pages) for pages in self.lists]

    def select_calls(self, share: float) -> list[Callable[[], object]]:
        """Return a call that selects the pages of all layers."""
        self.selection.mass.uniform_()
        count = num_listed(self.shape, share)
        ends = torch.arange(self.shape.batch + 1, dtype=torch.int32, device="cuda") * count
        out = torch.zeros(self.shape.batch * count, LAYERS, KV_HEADS, dtype=torch.int32).cuda()
        given = SelectedLists(self.indptr, self.lists[0], self.slots, ends, self.zeros + 1)
        return [lambda: self.selection.select(given, out, num_first=1)]
