"""Draft attention, over anchors and a full-precision tail, against the fp32 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from kvspec_kernels.codecs.turboquant import TurboQuantSettings
from kvspec_kernels.formats import Log4Settings, Uniform4Settings, anchor_layout
from kvspec_kernels.ops.attention import DraftAttention, Tail, workspace_nbytes
from kvspec_kernels.ops.attention_plan import AttentionPlan
from kvspec_kernels.ops.triton_attention import decodes_words
from kvspec_testkit.kernels.cases import AttentionCase, make_case, page_table, results_for
from kvspec_testkit.kernels.comparison import assert_attention

SETTINGS = {
    "log4": Log4Settings.for_page,
    "uniform4": Uniform4Settings.for_page,
    "log4-2bit": partial(Log4Settings.for_page, anchor_bits=2),
    "uniform4-2bit": partial(Uniform4Settings.for_page, anchor_bits=2),
    "turboquant-2bit": partial(TurboQuantSettings.for_page, anchor_bits=2),
    "turboquant-3bit": partial(TurboQuantSettings.for_page, anchor_bits=3),
    "turboquant-4bit": partial(TurboQuantSettings.for_page, anchor_bits=4),
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Codec, page size, head size, KV heads, group, dtype.
SHAPES = [
    ("log4", 64, 64, 2, 4, BF16),
    ("uniform4", 64, 128, 1, 8, BF16),
    ("log4", 128, 128, 2, 1, FP16),
    ("uniform4", 32, 96, 2, 1, FP16),
    ("log4", 32, 96, 1, 16, BF16),
    ("uniform4", 128, 256, 1, 4, BF16),
    ("log4", 64, 256, 1, 8, FP16),
    ("uniform4", 64, 64, 1, 16, FP32),
    # Records whose tiles are stored in groups of 2, and a group that is no power of two.
    ("uniform4", 96, 80, 3, 3, FP32),
    ("log4", 160, 16, 1, 5, BF16),
    ("log4-2bit", 64, 64, 2, 4, BF16),
    ("uniform4-2bit", 64, 128, 1, 2, FP16),
    # Pairs of tiles in groups of 2.
    ("log4-2bit", 96, 96, 1, 3, FP32),
    ("uniform4-2bit", 32, 32, 2, 1, FP32),
    # Rotated, in whole heads and in blocks.
    ("turboquant-4bit", 64, 128, 1, 4, BF16),
    ("turboquant-3bit", 32, 80, 2, 3, FP16),
    ("turboquant-2bit", 96, 96, 1, 2, FP32),
    ("turboquant-4bit", 32, 128, 2, 4, FP16),
    # Decoded by words: a page of several blocks, and heads of one group of tiles.
    ("uniform4", 192, 128, 2, 3, FP16),
    ("uniform4", 256, 64, 2, 4, BF16),
]
# Shapes whose anchors are decoded by words.
BY_WORDS = [SHAPES[1], *SHAPES[-2:]]


def shape_id(shape: tuple) -> str:
    codec, page_size, head_dim, heads, group, dtype = shape
    name = str(dtype).removeprefix("torch.")
    return f"{codec}-page{page_size}-head{head_dim}-kv{heads}-group{group}-{name}"


def options_of(shape: tuple, device: torch.device) -> dict[str, object]:
    codec, page_size, head_dim, heads, group, dtype = shape
    return {
        "settings": SETTINGS[codec](page_size),
        "source": "anchor",
        "page_size": page_size,
        "head_dim": head_dim,
        "num_kv_heads": heads,
        "group": group,
        "dtype": dtype,
        "device": device,
    }


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_awkward_lengths(shape, check, device):
    page_size = shape[1]
    lens = [0, 1, page_size - 1, page_size, page_size + 1]
    check(make_case(lens, **options_of(shape, device)))


def plan_of(shape: tuple, num_rows: int, device: torch.device) -> AttentionPlan:
    codec, page_size, head_dim, heads, group, dtype = shape
    return AttentionPlan(
        *(torch.zeros(n, dtype=torch.int32, device=device) for n in (2, 1, 1)),
        qo_indptr=None,
        num_qo_heads=heads * group,
        num_kv_heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        settings=SETTINGS[codec](page_size),
        source="anchor",
        q_dtype=dtype,
        sm_scale=1.0,
        max_qo_len=num_rows,
        num_sms=4,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_words_are_decoded_where_tiles_allow(shape, device):
    assert decodes_words(plan_of(shape, 1, device)) == (shape in BY_WORDS)


@pytest.mark.parametrize("shape", BY_WORDS, ids=shape_id)
def test_words_are_decoded_for_few_query_rows(shape, device):
    group = shape[4]
    assert decodes_words(plan_of(shape, 16 // group, device))
    assert not decodes_words(plan_of(shape, 16 // group + 1, device))


def test_attention_to_a_tail_alone_has_no_words(device):
    """Its kernel is the same for all codecs."""
    plan = plan_of(BY_WORDS[0], 1, device)
    assert not decodes_words(replace(plan, has_past=False))


@pytest.mark.parametrize("shape", BY_WORDS, ids=shape_id)
def test_zeros(shape, check, device):
    """Neither queries nor values give a unit."""
    case = make_case([shape[1] + 6, 5], tail_lens=[2, 1], **options_of(shape, device))
    layout = anchor_layout(case.settings, case.page_size, case.q.shape[-1])
    for name in ("scale", "zero"):
        layout[f"v_{name}"].view(case.anchors).zero_()
    case.q[0].zero_()
    check(case)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_awkward_tails(shape, check, device):
    page_size = shape[1]
    lens = [0, 0, 1, page_size, page_size + 3]
    tails = [0, page_size + 1, 0, 1, page_size]
    check(make_case(lens, tail_lens=tails, **options_of(shape, device)), num_sms=2)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=shape_id)
def test_one_long_among_short_is_split(shape, check, device):
    page_size = shape[1]
    lens = [3, 9 * page_size + 7, 0, 1]
    check(make_case(lens, tail_lens=[1, 5, 1, 2], **options_of(shape, device)), num_sms=6)


@pytest.mark.parametrize("length", [0, 1, 64, 65])
def test_batch_of_one(length, check, device):
    check(make_case([length], **options_of(SHAPES[0], device)))


@pytest.mark.parametrize("num_sms", [1, 3, 50])
def test_any_number_of_splits(num_sms, check, device):
    check(make_case([0, 200, 64], **options_of(SHAPES[0], device)), num_sms=num_sms)


@pytest.mark.parametrize(
    ("page_size", "settings"),
    [
        (96, Log4Settings(k_chunk=16, v_chunk=48)),
        (64, Log4Settings(k_chunk=64, v_chunk=32, alpha=2.0, levels="corner", centre="mean")),
        (64, Log4Settings(alpha=0.25, levels="interval")),
        (64, Uniform4Settings(k_group=32)),
        (128, Uniform4Settings(k_group=128)),
        (96, Log4Settings(k_chunk=16, v_chunk=48, top=105, centre="mean", anchor_bits=2)),
        (64, Uniform4Settings(k_group=16, anchor_bits=2)),
    ],
    ids=repr,
)
def test_other_settings(page_size, settings, check, device):
    sizes = {"page_size": page_size, "settings": settings, "device": device}
    check(make_case([page_size + 40, 20], source="anchor", **sizes))


# CUDA kernels decode to fp16 without units, so they cannot hold such values.
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e4, 1e10], ids=str)
@pytest.mark.parametrize("part", ["k", "v"])
def test_values_of_any_size(part, size, check, device):
    """Anchors have metadata in bf16, also where an fp16 number cannot hold a value."""
    case = make_case([70, 5], **options_of(SHAPES[1], device))
    layout = anchor_layout(case.settings, case.page_size, case.q.shape[-1])
    for name in ("scale", "zero"):
        layout[f"{part}_{name}"].view(case.anchors).mul_(size)
    if part == "k":
        case.q.div_(size)
    check(case)


def test_given_scale(check, device):
    check(make_case([70, 5], **options_of(SHAPES[0], device)), sm_scale=0.3)


def test_lengths_change_in_place(prepare, device):
    case = make_case([200, 64, 10], tail_lens=[3, 1, 2], **options_of(SHAPES[0], device))
    run = prepare(case, num_sms=4)
    for lens, tails in (
        ([200, 64, 10], [3, 1, 2]),
        ([65, 0, 9], [1, 1, 2]),
        ([0, 63, 1], [2, 0, 1]),
    ):
        other = case.shortened(lens)
        for name in ("indptr", "indices", "last_page_len"):
            getattr(case, name).copy_(getattr(other, name))
        case.tail.lens.copy_(torch.tensor(tails))
        out, lse = results_for(case)
        run(out, lse)
        assert_attention(case, out, lse)


ROWS = pytest.mark.parametrize("num_rows", [2, 4, 16])


@ROWS
@pytest.mark.parametrize(
    "shape", [*SHAPES[:2], SHAPES[4], SHAPES[8], SHAPES[11], SHAPES[14], SHAPES[-2]], ids=shape_id
)
def test_several_query_tokens(shape, num_rows, check, device):
    """Query tokens are the tail's last ones. Tails of fewer tokens hide even the first of these."""
    page_size = shape[1]
    lens = [0, 1, 2 * page_size, page_size + 3, 0]
    tails = [num_rows, page_size + num_rows, 1, num_rows - 1, 0]
    options = {"q_lens": [num_rows] * len(lens), "tail_lens": tails}
    check(make_case(lens, **options, **options_of(shape, device)), num_sms=3)


@ROWS
def test_several_query_tokens_without_a_tail(num_rows, check, device):
    lens = [70, 0, 130]
    check(make_case(lens, q_lens=[num_rows] * 3, **options_of(SHAPES[0], device)))


@ROWS
def test_query_tokens_do_not_depend_on_tokens_behind_them(num_rows, prepare, device):
    """The last row of one token more sees what a single row sees."""
    shape = SHAPES[0]
    lens, tails = [100, 64, 0], [num_rows + 1, num_rows, num_rows + 7]
    options = options_of(shape, device)
    case = make_case(lens, q_lens=[num_rows] * 3, tail_lens=tails, **options)
    out, lse = results_for(case)
    prepare(case)(out, lse)
    for row in range(num_rows):
        seen = case.tail.lens - (num_rows - 1 - row)
        q = case.q.view(3, num_rows, *case.q.shape[1:])[:, row].contiguous()
        ends = torch.arange(4, dtype=torch.int32, device=device)
        single = replace(case, q=q, qo_indptr=ends, tail=case.tail._replace(lens=seen))
        assert_attention(
            single, *(part.view(3, num_rows, *part.shape[1:])[:, row] for part in (out, lse))
        )


def with_lists(case, lists):
    """Return the case in which request b reads pages lists[b][i] of its own."""
    chosen = [own[pages] for own, pages in zip(case.pages, lists, strict=True)]
    lens = [len(pages) * case.page_size for pages in chosen]
    indptr, indices, last_page_len = page_table(chosen, lens, case.page_size)
    return replace(case, indptr=indptr, indices=indices, last_page_len=last_page_len)


@dataclass
class ByHead:
    """A case for assert_attention(), in which KV head h is that of cases[h]."""

    q: torch.Tensor
    qo_indptr: torch.Tensor
    cases: list[AttentionCase]

    def reference(self, dtype, sm_scale=None):
        return self._joined([case.reference(dtype, sm_scale) for case in self.cases])

    def baseline(self, dtype, sm_scale=None):
        return self._joined([case.baseline(dtype, sm_scale) for case in self.cases])

    @staticmethod
    def _joined(states):
        parts = [[part.chunk(len(states), dim=1)[h] for part in s] for h, s in enumerate(states)]
        return tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))


@pytest.mark.parametrize(
    "shape", [SHAPES[0], SHAPES[8], SHAPES[10], SHAPES[16], SHAPES[-1]], ids=shape_id
)
@pytest.mark.parametrize("tails", [None, [3, 0, 1]], ids=["no tail", "tail"])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_heads_that_read_pages_of_their_own(shape, tails, num_rows, prepare, device):
    size, heads = shape[1], shape[3]
    options = {"tail_lens": tails, "q_lens": [num_rows] * 3, **options_of(shape, device)}
    case = make_case([4 * size, 2 * size, 3 * size], **options)
    # Lists by head and request. The request's longest list gives its number of entries.
    lists = [[[0, 2, 3], [], [1]], [[1, 2], [0], [0]], [[3], [1], [2]]][:heads]
    counts = [3, 1, 1]
    cases = [with_lists(case, of_head) for of_head in lists]
    # The layer's lists lie between those of other layers. Entries behind them belong to no request.
    indices = torch.full((sum(counts) + 2, 2, heads), 77_777, dtype=torch.int32, device=device)
    indices[: sum(counts), 1] = -1
    for head, each in enumerate(cases):
        first = 0
        for count, (begin, end) in zip(counts, pairwise(each.indptr.tolist()), strict=True):
            indices[first : first + end - begin, 1, head] = each.indices[begin:end]
            first += count
    whole = with_lists(case, [[0] * count for count in counts])
    out, lse = results_for(case)
    prepare(replace(whole, indices=indices[:, 1]), num_sms=3)(out, lse)
    assert_attention(ByHead(case.q, case.qo_indptr, cases), out, lse)


def test_views_of_wider_tensors(prepare, device):
    """Anchors of a layer lie between those of two others, q within qkv, and out within a padded
    buffer."""
    case = make_case([70, 0, 130], tail_lens=[1, 2, 3], **options_of(SHAPES[0], device))
    qkv = torch.full((3, 12, 96), torch.nan, dtype=case.q.dtype, device=device)
    qkv[:, 2:10, :64] = case.q
    layers = torch.stack((case.anchors, case.anchors, case.anchors), dim=1)
    layers[:, 0], layers[:, 2] = 255, 255
    windows = [
        torch.stack((part, torch.full_like(part, torch.nan)), dim=3)[:, :, :, 0]
        for part in case.tail[:2]
    ]
    whole = torch.full((3, 12, 96), torch.nan, dtype=case.q.dtype, device=device)
    case.q.set_(qkv[:, 2:10, :64])
    case.anchors.set_(layers[:, 1])
    case.tail.window_k.set_(windows[0])
    case.tail.window_v.set_(windows[1])
    out, lse = whole[:, 2:10, :64], results_for(case)[1]
    prepare(case)(out, lse)
    assert_attention(case, out, lse)
    out.fill_(torch.nan)
    assert whole.isnan().all(), "written outside of out"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_qo_heads": 3}, r"num_qo_heads must be 1 to 16 times num_kv_heads, got 3 and 2"),
        ({"num_qo_heads": 34}, r"num_qo_heads must be 1 to 16 times num_kv_heads, got 34 and 2"),
        ({"head_dim": 72}, r"head size must be a multiple of 16 from 16 to 256, got 72"),
        ({"page_size": 48}, r"page size must be a multiple of 32 from 32 to 256, got 48"),
        ({"settings": Log4Settings(k_chunk=48)}, r"k_chunk must divide the page size 64"),
        ({"q_dtype": torch.float64}, r"q_dtype must be one of .*bfloat16.*, got torch.float64"),
        ({"indptr": torch.zeros(4)}, r"indptr must be torch.int32, got torch.float32"),
        (
            {"last_page_len": torch.zeros(5, dtype=torch.int32)},
            r"last_page_len must have shape \[3\]",
        ),
        (
            {"indices": torch.zeros(4, 3, dtype=torch.int32)},
            r"indices must have shape \[any, 2\], got \[4, 3\]",
        ),
        ({"num_sms": 0}, r"num_sms must be at least 1, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_plans_that_are_refused(changes, message, device):
    index = torch.zeros(4, dtype=torch.int32, device=device)
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 64}
    index_tensors = {"indptr": index, "indices": index, "last_page_len": index[:3]}
    options = {**index_tensors, **sizes, "settings": Log4Settings(), "q_dtype": BF16}
    changes = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in changes.items()
    }
    attention = DraftAttention(torch.empty(1 << 26, dtype=torch.uint8, device=device))
    attention.plan(**options)
    with pytest.raises(ValueError, match=message):
        attention.plan(**(options | changes))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "q",
            torch.zeros(2, 8, 64, dtype=BF16),
            r"q must have shape \[3, 8, 64\], got \[2, 8, 64\]",
        ),
        ("q", torch.zeros(3, 8, 64), r"q must be torch.bfloat16, got torch.float32"),
        (
            "out",
            torch.zeros(3, 8, 128, dtype=BF16)[..., ::2],
            r"out must be contiguous in its last",
        ),
        ("lse", torch.zeros(3, 8, dtype=BF16), r"lse must be torch.float32"),
        (
            "anchors",
            torch.zeros(5, 2, 100, dtype=torch.uint8),
            r"anchors must have shape \[any, 2, \d+\]",
        ),
        ("tail", Tail(*(torch.zeros(4, 64, 2, 64),) * 5), r"tail.window_k must be torch.bfloat16"),
    ],
    ids=["q-shape", "q-dtype", "out-strides", "lse-dtype", "anchors-shape", "tail-dtype"],
)
def test_tensors_that_are_refused(name, value, message, device):
    case = make_case([70, 0, 13], **options_of(SHAPES[0], device))
    attention = DraftAttention(torch.empty(1 << 26, dtype=torch.uint8, device=device))
    attention.plan(
        case.indptr,
        case.indices,
        case.last_page_len,
        8,
        2,
        64,
        64,
        settings=case.settings,
        q_dtype=BF16,
    )
    if name == "tail":
        value = Tail(*(part.to(device) for part in value))
    else:
        # Copy with strides, which to(device) does not keep.
        value = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=device
        ).copy_(value)
    with pytest.raises(ValueError, match=message):
        attention.run(**({"q": case.q, "anchors": case.anchors} | {name: value}))


def test_misuse_of_the_wrapper(device):
    small = DraftAttention(torch.empty(64, dtype=torch.uint8, device=device))
    with pytest.raises(RuntimeError, match=r"run\(\) was called before plan\(\)"):
        small.run(torch.zeros(1, 1, 64), torch.zeros(1))
    index = torch.zeros(2, dtype=torch.int32, device=device)
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 64}
    needed = workspace_nbytes(batch_size=1, settings=Log4Settings(), device=device, **sizes)
    with pytest.raises(ValueError, match=f"workspace must have at least {needed} bytes, got 64"):
        small.plan(index, index, index[:1], **sizes, settings=Log4Settings(), q_dtype=BF16)
    with pytest.raises(ValueError, match="workspace must be a contiguous uint8 tensor"):
        DraftAttention(torch.empty(64, device=device))
    with pytest.raises(ValueError, match="backend must be auto, cuda or triton, got 'hip'"):
        DraftAttention(torch.empty(64, dtype=torch.uint8, device=device), "hip")
