"""Launches of every Triton kernel of the product, on small tensors of the CPU, to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from kvspec_kernels.codecs.coverage import MOST_ROTATED
from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.codecs.turboquant import TurboQuantSettings
from kvspec_kernels.formats import (
    Log4Settings,
    Target,
    Uniform4Settings,
    anchor_layout,
    residual_layout,
)
from kvspec_kernels.ops import deterministic_attention, int4_products, products
from kvspec_kernels.ops import triton_attention as triton_back_end
from kvspec_kernels.ops.append import append
from kvspec_kernels.ops.attention import DraftAttention, Tail, VerifyAttention, workspace_nbytes
from kvspec_kernels.ops.attention_plan import Source
from kvspec_kernels.ops.copy_rows import copy_rows
from kvspec_kernels.ops.deterministic_attention import Past
from kvspec_kernels.ops.encode import encode_pages
from kvspec_kernels.ops.int4_rounding import round_group
from kvspec_kernels.ops.page_selection import PageSelection, ScoredRequests, SelectedLists
from kvspec_kernels.ops.steps import StepEnd, begin_step
from kvspec_kernels.reference.int4_weights import GROUP
from kvspec_testkit.kernels.cases import make_case

CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16
CODECS: Mapping[str, type[CodecSpec]] = {
    "uniform4": Uniform4Settings,
    "log4": Log4Settings,
    "turboquant": TurboQuantSettings,
}
# Codecs with the target int8.
WITH_INT8 = ("uniform4", "log4")
# Multiprocessors that launches plan for. Compiled code does not depend on them.
NUM_SMS = 80
NUM_KV_HEADS = 2


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attend(
    codec: str,
    source: Source,
    head_dim: int,
    num_queries: int,
    *,
    page_size: int = 64,
    group: int = 4,
    dtype: torch.dtype = BF16,
    anchor_bits: int = 4,
    is_deterministic: bool = False,
) -> None:
    """Launch draft or verify attention of two requests with a page and a tail each."""
    settings = CODECS[codec].for_page(page_size, anchor_bits)
    lens, q_lens = [page_size] * 2, [num_queries] * 2
    case = make_case(
        lens,
        settings=settings,
        source=source,
        page_size=page_size,
        head_dim=head_dim,
        num_kv_heads=NUM_KV_HEADS,
        group=group,
        dtype=dtype,
        q_lens=q_lens,
        tail_lens=q_lens,
    )
    pages = 64 if is_deterministic else None
    sizes = (NUM_KV_HEADS * group, NUM_KV_HEADS, head_dim, page_size)
    nbytes = workspace_nbytes(
        batch_size=2,
        num_qo_heads=sizes[0],
        num_kv_heads=sizes[1],
        head_dim=head_dim,
        page_size=page_size,
        settings=settings,
        device=CPU,
        q_dtype=dtype,
        source=source,
        max_qo_len=num_queries,
        num_sms=NUM_SMS,
        backend="triton",
        deterministic_pages=pages,
    )
    memory = torch.empty(nbytes + 16, dtype=torch.uint8)
    workspace = memory[-memory.data_ptr() % 16 :][:nbytes]
    index = (case.indptr, case.indices, case.last_page_len)
    # A plan refuses to launch on a CPU, unless kernels are interpreted.
    triton_back_end.INTERPRETED = True
    try:
        attention: DraftAttention | VerifyAttention
        if source == "anchor":
            attention = DraftAttention(workspace, "triton")
            attention.plan(
                *index, *sizes, settings=settings, q_dtype=dtype, num_sms=NUM_SMS,
                num_rows=num_queries,
            )  # fmt: skip
        else:
            attention = VerifyAttention(workspace, "triton")
            attention.plan(
                case.qo_indptr, *index, *sizes, settings=settings, target=source, q_dtype=dtype,
                max_qo_len=num_queries, num_sms=NUM_SMS, deterministic_pages=pages,
            )  # fmt: skip
    finally:
        triton_back_end.INTERPRETED = False
    ready = attention._ready
    assert isinstance(ready, triton_back_end.TritonAttention)
    ready._shared["INTERPRET"] = False
    if isinstance(attention, DraftAttention):
        attention.run(case.q, case.anchors, case.tail)
    else:
        records = (case.anchors, case.residuals, case.residual_slots)
        attention.run(case.q, *records, case.tail)


def attend_in_order(
    page_size: int, head_dim: int, dtype: torch.dtype = BF16, *, shares_chunks: bool = True
) -> None:
    """Launch deterministic attention at the exact target."""
    heads = NUM_KV_HEADS * 4
    pages = torch.zeros((4, NUM_KV_HEADS, page_size, head_dim), dtype=dtype)
    window = torch.zeros((4, page_size, NUM_KV_HEADS, head_dim), dtype=dtype)
    q = torch.zeros((2, heads, head_dim), dtype=dtype)
    past = Past(pages, pages.clone(), ints(0, 1, 2, 3), ints(0, 1, 2), ints(0, 1))
    tail = Tail(window, window.clone(), ints(0, 1, 2), ints(0, 1), ints(1, 1))
    parts = torch.zeros((2, 4, heads, head_dim + 2)) if shares_chunks else None
    deterministic_attention.deterministic_attention(q, past, tail, ints(0, 1, 2), 1, parts=parts)


def multiply(number: int, dtype: torch.dtype) -> None:
    """Launch the product of a deterministic server with its tile of this number, if there is one
    more."""
    rows, weight = torch.zeros((300, 4096), dtype=dtype), torch.zeros((4096, 4096), dtype=dtype)
    for tile in products.tiles_of(CPU).all[number : number + 1]:
        products.multiply(rows, weight, None, tile)


def multiply_in_4_bits(num_rows: int) -> None:
    weight = int4_products.empty(4096, 4096, CPU)
    int4_products.product(torch.zeros((num_rows, 4096), dtype=BF16), weight, None, "triton")


def round_weights() -> None:
    size = GROUP
    round_group(torch.zeros((4096, size)), torch.zeros((size, size)))


def encode(
    codec: str, page_size: int, head_dim: int, target: Target, dtype: torch.dtype = BF16
) -> None:
    settings = CODECS[codec].for_page(page_size, 4)
    k = torch.zeros((2, page_size, NUM_KV_HEADS, head_dim), dtype=dtype)
    sizes = (page_size, head_dim)
    anchor = anchor_layout(settings, *sizes)
    residual = residual_layout(settings, target, *sizes, dtype)
    anchors, residuals = (
        torch.zeros((2, NUM_KV_HEADS, layout.nbytes), dtype=torch.uint8)
        for layout in (anchor, residual)
    )
    slots = ints(0, 1)
    records = (anchors, slots, residuals, slots)
    encode_pages(k, k.clone(), slots, *records, settings, target, "triton")


def write_tokens() -> None:
    new = torch.zeros((2, NUM_KV_HEADS, 128), dtype=BF16)
    window = torch.zeros((2, 64, NUM_KV_HEADS, 128), dtype=BF16)
    append(new, new.clone(), window, window.clone(), ints(0, 1), ints(0, 0))


def select_pages(codec: str, head_dim: int, group: int, most_queries: int) -> None:
    """Launch the scores of pages, and the selection of the best."""
    settings = CODECS[codec].for_page(64, 4)
    heads = NUM_KV_HEADS * group
    selection = PageSelection(
        2, 64, 3, 2048, 2, heads, NUM_KV_HEADS, head_dim, 64, most_queries,
        settings=settings, q_dtype=BF16, device=CPU, backend="triton",
    )  # fmt: skip
    nbytes = anchor_layout(settings, 64, head_dim).nbytes
    anchors = torch.zeros((4, NUM_KV_HEADS, nbytes), dtype=torch.uint8)
    q = torch.zeros((8, heads, head_dim), dtype=BF16)
    scored = ScoredRequests(ints(0, 1, 2), *(ints(0, 1),) * 2, ints(1, 1), ints(0, 1), ints(0, 0))
    selection.score(0, q, anchors, scored)
    lists = SelectedLists(ints(0, 1, 2), *(ints(0, 1),) * 2, ints(0, 1, 2), ints(1, 1))
    out = torch.zeros((8, 2, NUM_KV_HEADS), dtype=torch.int32)
    selection.select(lists, out, num_first=1)


def step() -> None:
    """Launch what surrounds the model in a captured step."""
    batch = 64
    indptr = torch.zeros(batch + 1, dtype=torch.int32)
    slots, lens, limits, places, offsets = (indptr[1:].clone() for _ in range(5))
    begin_step(indptr, slots, lens, limits, places, offsets, 64)
    tokens, positions = (torch.zeros(batch, dtype=torch.int64) for _ in range(2))
    logits = torch.zeros((batch, 128256), dtype=BF16)
    made, number = torch.zeros((8, batch), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    StepEnd(batch, CPU)(logits, lens, limits, tokens, positions, made, number)


def copy() -> None:
    target, source = (torch.zeros((4, 2, 4096), dtype=torch.uint8) for _ in range(2))
    copy_rows(target, ints(0, 1), source, ints(2, 3))


def head_dims(codec: str) -> list[int]:
    rotates = CODECS[codec].for_page(64, 4).triton_decode(64).rotates
    return [size for size in (64, 128, 256) if size <= (MOST_ROTATED if rotates else size)]


def _attention_launches() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for codec in CODECS:
        for head_dim in head_dims(codec):
            shape = f"{codec}, heads of {head_dim}"
            for rows in (1, 16):
                found[f"draft of {rows}, {shape}"] = partial(
                    attend, codec, "anchor", head_dim, rows
                )
                if codec in WITH_INT8:
                    found[f"verify int8 of {rows}, {shape}"] = partial(
                        attend, codec, "int8", head_dim, rows
                    )
            if codec in WITH_INT8:
                found[f"verify int8 in order, {shape}"] = partial(
                    attend, codec, "int8", head_dim, 16, is_deterministic=True
                )
    for head_dim in (64, 128, 256):
        for rows in (1, 16):
            found[f"verify exact of {rows}, heads of {head_dim}"] = partial(
                attend, "uniform4", "exact", head_dim, rows
            )
    for head_dim in (80, 96, 112):
        found[f"verify int8 of 16, uniform4, heads of {head_dim}, fp16"] = partial(
            attend, "uniform4", "int8", head_dim, 16, dtype=FP16
        )
    for page_size in (32, 128):
        found[f"verify int8 of 16, uniform4, heads of 128, pages of {page_size}"] = partial(
            attend, "uniform4", "int8", 128, 16, page_size=page_size
        )
    found["draft of 1, uniform4 in 2 bits, heads of 128"] = partial(
        attend, "uniform4", "anchor", 128, 1, anchor_bits=2
    )
    for page_size in (64, 256):
        found[f"verify int8 of 16, uniform4 in 2 bits, heads of 128, pages of {page_size}"] = (
            partial(attend, "uniform4", "int8", 128, 16, anchor_bits=2, page_size=page_size)
        )
    for group in (1, 8, 16):
        found[f"draft of 1, uniform4, heads of 128, groups of {group}"] = partial(
            attend, "uniform4", "anchor", 128, 1, group=group
        )
    return found


def _launches() -> dict[str, Callable[[], None]]:
    found = _attention_launches()
    for page_size, head_dim in (
        (16, 64),
        (64, 64),
        (128, 64),
        (64, 128),
        (128, 128),
        (16, 256),
        (64, 256),
    ):
        found[f"exact in order, pages of {page_size}, heads of {head_dim}"] = partial(
            attend_in_order, page_size, head_dim
        )
    found["exact in order of one program, pages of 64, heads of 128"] = partial(
        attend_in_order, 64, 128, shares_chunks=False
    )
    for number in range(len(products.LARGE.all)):
        found[f"product, tile {number}"] = partial(multiply, number, BF16)
    for num_rows in int4_products.CHOSEN:
        found[f"4-bit product of {num_rows} rows"] = partial(multiply_in_4_bits, num_rows)
    for codec in CODECS:
        targets: tuple[Target, ...] = ("int8", "exact") if codec in WITH_INT8 else ("exact",)
        for target in targets:
            for page_size, head_dim in ((64, 128), (64, 256), (128, 256)):
                if head_dim not in head_dims(codec):
                    continue
                name = f"encode {target}, {codec}, pages of {page_size}, heads of {head_dim}"
                found[name] = partial(encode, codec, page_size, head_dim, target)
        found[f"scores, {codec}, heads of 128"] = partial(select_pages, codec, 128, 4, 16)
        if 256 in head_dims(codec):
            found[f"scores, {codec}, heads of 256"] = partial(select_pages, codec, 256, 8, 16)
    return found | {
        "append": write_tokens,
        "step": step,
        "copy of rows": copy,
        "rounding to 4 bits": round_weights,
    }


LAUNCHES = _launches()
# Launches of each kernel that need the most memory or registers.
SAMPLE = (
    "draft of 1, uniform4, heads of 128",
    "verify int8 of 16, log4, heads of 128",
    "verify int8 of 16, uniform4, heads of 256",
    "verify int8 in order, uniform4, heads of 128",
    "verify exact of 16, heads of 128",
    "exact in order, pages of 64, heads of 256",
    "exact in order, pages of 128, heads of 128",
    *(f"product, tile {number}" for number in range(len(products.LARGE.all))),
    "4-bit product of 64 rows",
    "encode int8, uniform4, pages of 128, heads of 256",
    "draft of 1, turboquant, heads of 128",
    "encode exact, turboquant, pages of 64, heads of 128",
    "scores, turboquant, heads of 128",
    "scores, uniform4, heads of 256",
    "append",
    "step",
    "copy of rows",
    "rounding to 4 bits",
)
