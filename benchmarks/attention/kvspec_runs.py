"""Attention kernels of KVSpec on the same shapes, through their public wrappers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attention.shapes import HEAD_DIM, KV_HEADS, PAGE_SIZE, QO_HEADS, Shape
from kvspec_kernels.codecs import CodecSpec
from kvspec_kernels.codecs.turboquant import TurboQuantSettings
from kvspec_kernels.formats import Log4Settings, Uniform4Settings, anchor_layout, residual_layout
from kvspec_kernels.ops.attention import (
    Backend,
    DraftAttention,
    Tail,
    VerifyAttention,
    workspace_nbytes,
)
from kvspec_kernels.ops.attention_plan import Arithmetic, Source
from kvspec_kernels.reference.codec import reference_of

CODECS: dict[str, CodecSpec] = {
    "log4": Log4Settings.for_page(PAGE_SIZE),
    "uniform4": Uniform4Settings.for_page(PAGE_SIZE),
}
TWO_BIT_CODECS: dict[str, CodecSpec] = {
    "log4": Log4Settings.for_page(PAGE_SIZE, anchor_bits=2),
    "uniform4": Uniform4Settings.for_page(PAGE_SIZE, anchor_bits=2),
}
ROTATED_CODECS: dict[str, CodecSpec] = {
    f"turboquant_{bits}bit": TurboQuantSettings.for_page(PAGE_SIZE, bits) for bits in (4, 3, 2)
}
DISTINCT_PAGES = 64


def record_bytes(settings: CodecSpec) -> int:
    """Return the bytes of the anchor record of one page and KV head."""
    return anchor_layout(settings, PAGE_SIZE, HEAD_DIM).nbytes


def refined_bytes(settings: CodecSpec) -> int:
    """Return the bytes of anchor and 4-bit correction of one page and KV head."""
    layout = residual_layout(settings, "int8", PAGE_SIZE, HEAD_DIM, torch.bfloat16)
    return record_bytes(settings) + layout.nbytes


def anchor_records(settings: CodecSpec, num_pages: int) -> torch.Tensor:
    """Return anchor records of random pages: DISTINCT_PAGES pages, repeated."""
    anchor = anchor_layout(settings, PAGE_SIZE, HEAD_DIM)
    anchors, _ = reference_of(settings).encode(*_random_pages(), settings, anchor)
    return _repeated(anchors, num_pages)


def records(settings: CodecSpec, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return anchor and correction records of random pages: DISTINCT_PAGES pages, repeated."""
    anchor = anchor_layout(settings, PAGE_SIZE, HEAD_DIM)
    residual = residual_layout(settings, "int8", PAGE_SIZE, HEAD_DIM, torch.bfloat16)
    anchors, corrections = reference_of(settings).encode(
        *_random_pages(), settings, anchor, residual
    )
    assert corrections is not None
    return _repeated(anchors, num_pages), _repeated(corrections, num_pages)


def _random_pages() -> tuple[torch.Tensor, torch.Tensor]:
    shape = (DISTINCT_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    return k, v


def _repeated(distinct: torch.Tensor, num_pages: int) -> torch.Tensor:
    return distinct.repeat(-(-num_pages // DISTINCT_PAGES), 1, 1)


def draft_calls(
    settings: CodecSpec, shape: Shape, arithmetic: Arithmetic = "auto", backend: Backend = "auto"
) -> list[Callable[[], object]]:
    """Return calls of draft attention: one query token per request over anchors."""
    copies = shape.rotations(shape.num_pages * KV_HEADS * record_bytes(settings))
    indptr, lists, last = shape.page_tables(copies)
    anchors = anchor_records(settings, shape.num_pages * copies)
    q = torch.randn(shape.batch, QO_HEADS, HEAD_DIM, device="cuda").bfloat16()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    workspace = workspace_of(settings, shape, 1, arithmetic=arithmetic, backend=backend)

    def call_on(indices: torch.Tensor) -> Callable[[], object]:
        wrapper = DraftAttention(workspace, backend)
        heads = (QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
        wrapper.plan(
            indptr,
            indices,
            last,
            *heads,
            settings=settings,
            q_dtype=torch.bfloat16,
            arithmetic=arithmetic,
        )
        return lambda: wrapper.run(q, anchors, out=out, lse=lse)

    return [call_on(indices) for indices in lists]


def verify_calls(
    settings: CodecSpec, shape: Shape, num_new: int, backend: Backend = "auto"
) -> list[Callable[[], object]]:
    """Return calls of verify attention: `num_new` query tokens per request over 8-bit pages and a
    last page in BF16, which holds the query tokens."""
    past = Shape(shape.batch, shape.context - PAGE_SIZE)
    copies = shape.rotations(past.num_pages * KV_HEADS * refined_bytes(settings))
    indptr, lists, last = past.page_tables(copies)
    anchors, residuals = records(settings, past.num_pages * copies)
    slots = torch.randperm(len(residuals), device="cuda").int()
    window = torch.randn(
        2, shape.batch, PAGE_SIZE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16
    )
    steps = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda")
    lens = torch.full((shape.batch,), PAGE_SIZE, dtype=torch.int32, device="cuda")
    tail = Tail(window[0], window[1], steps, steps[:-1].contiguous(), lens)
    q = torch.randn(shape.batch * num_new, QO_HEADS, HEAD_DIM, device="cuda").bfloat16()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    workspace = workspace_of(settings, shape, num_new, "int8", backend=backend)

    def call_on(indices: torch.Tensor) -> Callable[[], object]:
        wrapper = VerifyAttention(workspace, backend)
        heads = (QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
        wrapper.plan(
            steps * num_new,
            indptr,
            indices,
            last,
            *heads,
            settings=settings,
            target="int8",
            q_dtype=torch.bfloat16,
            max_qo_len=num_new,
        )
        return lambda: wrapper.run(q, anchors, residuals, slots, tail, out=out, lse=lse)

    return [call_on(indices) for indices in lists]


def workspace_of(
    settings: CodecSpec,
    shape: Shape,
    max_qo_len: int,
    source: Source = "anchor",
    arithmetic: Arithmetic = "auto",
    backend: Backend = "auto",
    *,
    has_lists_by_head: bool = False,
) -> torch.Tensor:
    """Return a workspace for plans of a shape, as workspace_nbytes() sizes it."""
    nbytes = workspace_nbytes(
        batch_size=shape.batch,
        num_qo_heads=QO_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=PAGE_SIZE,
        settings=settings,
        device=torch.device("cuda"),
        source=source,
        max_qo_len=max_qo_len,
        arithmetic=arithmetic,
        backend=backend,
        has_lists_by_head=has_lists_by_head,
    )
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
