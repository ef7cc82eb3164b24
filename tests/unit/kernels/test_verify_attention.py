"""Verify attention over pages at the target precision, causal within the tail."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product

import pytest
import torch

from kvspec_kernels import formats
from kvspec_kernels.formats import Log4Settings, Uniform4Settings
from kvspec_kernels.jit import cuda_verify
from kvspec_kernels.jit.cuda_verify import tail_aligned
from kvspec_kernels.ops.attention import VerifyAttention
from kvspec_kernels.ops.attention_plan import AttentionPlan
from kvspec_kernels.ops.triton_attention import decodes_refined
from kvspec_testkit.kernels.cases import make_case, results_for
from kvspec_testkit.kernels.comparison import assert_attention

SETTINGS = {
    "log4": Log4Settings.for_page,
    "uniform4": Uniform4Settings.for_page,
    "log4-2bit": partial(Log4Settings.for_page, anchor_bits=2),
    "uniform4-2bit": partial(Uniform4Settings.for_page, anchor_bits=2),
    "uniform4-wide": lambda page_size: Uniform4Settings(k_group=page_size),
}
HAS_CUDA = torch.cuda.is_available()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Target, codec, page size, head size, KV heads, group, dtype.
SHAPES = [
    ("int8", "log4", 64, 64, 2, 4, BF16),
    ("int8", "uniform4", 64, 128, 1, 8, BF16),
    ("int8", "log4", 32, 96, 2, 1, FP16),
    ("int8", "uniform4", 128, 256, 1, 2, FP16),
    ("int8", "uniform4", 96, 80, 1, 3, FP32),
    ("exact", "log4", 64, 64, 1, 16, BF16),
    ("exact", "uniform4", 32, 96, 2, 2, FP16),
    ("exact", "log4", 128, 256, 1, 1, FP32),
    ("int8", "log4-2bit", 64, 64, 1, 4, FP16),
    ("int8", "uniform4-2bit", 96, 96, 1, 2, BF16),
    ("exact", "log4-2bit", 32, 32, 2, 1, BF16),
    ("int8", "log4-2bit", 64, 128, 1, 8, BF16),
    ("int8", "uniform4-2bit", 128, 256, 1, 2, FP16),
    ("int8", "uniform4", 256, 64, 2, 1, BF16),
    ("int8", "uniform4-2bit", 64, 64, 1, 4, BF16),
    ("int8", "uniform4-2bit", 128, 128, 1, 2, BF16),
    ("int8", "uniform4-2bit", 256, 64, 1, 2, BF16),
    ("int8", "uniform4-wide", 256, 64, 1, 2, BF16),
    ("int8", "uniform4", 192, 128, 1, 2, BF16),
]
# Those whose words jit/refined_attention.py decodes.
BY_WORDS = [SHAPES[1], *SHAPES[13:18]]


def shape_id(shape: tuple) -> str:
    target, codec, page_size, head_dim, heads, group, dtype = shape
    name = str(dtype).removeprefix("torch.")
    return f"{target}-{codec}-page{page_size}-head{head_dim}-kv{heads}-group{group}-{name}"


def options_of(shape: tuple, device: torch.device) -> dict[str, object]:
    target, codec, page_size, head_dim, heads, group, dtype = shape
    return {
        "settings": SETTINGS[codec](page_size),
        "source": target,
        "page_size": page_size,
        "head_dim": head_dim,
        "num_kv_heads": heads,
        "group": group,
        "dtype": dtype,
        "device": device,
    }


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_which_pages_are_decoded_by_words(shape, device):
    target, codec, page_size, head_dim, heads, group, dtype = shape
    index = torch.zeros(2, dtype=torch.int32, device=device)
    plan = AttentionPlan(
        indptr=index,
        indices=index,
        last_page_len=index[:1],
        qo_indptr=index,
        num_qo_heads=heads * group,
        num_kv_heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        settings=SETTINGS[codec](page_size),
        q_dtype=dtype,
        sm_scale=1.0,
        source=target,
        max_qo_len=4,
        num_sms=1,
    )
    assert decodes_refined(plan) == (shape in BY_WORDS)


WAYS_TO_JOIN = ["joined by a kernel", "by the last block"]


def join(way, monkeypatch):
    """Select the way in which kernels that are planned from here on join the parts of a request."""
    most = 0 if way == "joined by a kernel" else 10**6
    monkeypatch.setattr(cuda_verify, "MOST_JOINED", most)
    monkeypatch.setattr(cuda_verify, "MOST_ROWS_JOINED", most)


@pytest.fixture(autouse=True, params=WAYS_TO_JOIN if HAS_CUDA else [""])
def most_joined(request, monkeypatch):
    """Run each test with both ways of joining the parts that blocks of the CUDA kernel compute."""
    join(request.param, monkeypatch)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_awkward_lengths(shape, check, device):
    """Requests without queries, without a past, and with tails that cross into other pages."""
    page_size = shape[2]
    lens = [page_size + 1, 0, page_size - 1, page_size]
    q_lens = [3, 1, 0, 11]
    tails = [3, 1, 2, page_size + 9]
    case = make_case(lens, q_lens=q_lens, tail_lens=tails, **options_of(shape, device))
    check(case, num_sms=2)


@pytest.mark.parametrize("shape", SHAPES[:2] + SHAPES[5:6], ids=shape_id)
def test_without_a_tail_every_query_sees_the_past(shape, check, device):
    check(make_case([65, 0, 1], q_lens=[4, 2, 1], **options_of(shape, device)))


@pytest.mark.parametrize("q_len", [1, 2, 16, 17, 65])
def test_number_of_queries(q_len, check, device):
    """Query tokens of a request, in rows of 1 to 5 blocks."""
    case = make_case([70], q_lens=[q_len], tail_lens=[q_len + 3], **options_of(SHAPES[0], device))
    check(case)


@pytest.mark.parametrize("q_len", [1, 3, 6, 12, 40])
def test_maxima_that_rise_within_a_page(q_len, check, device):
    """Scores differ so much that new maxima occur in many steps and pages. There are 1 to 16
    columns of 8 query rows."""
    shape = ("int8", "uniform4", 256, 64, 1, 4, BF16)
    case = make_case(
        [700], q_lens=[q_len], tail_lens=[q_len + 200], seed=1, **options_of(shape, device)
    )
    check(case, sm_scale=4.0, num_sms=1)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=shape_id)
def test_one_long_among_short_is_split(shape, check, device):
    page_size = shape[2]
    lens = [5, 7 * page_size + 1, 0]
    case = make_case(lens, q_lens=[2, 4, 1], tail_lens=[2, 70, 1], **options_of(shape, device))
    check(case, num_sms=8)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 9, 40])
@pytest.mark.parametrize("pages", [129, 700])
def test_many_blocks_share_a_request(pages, q_len, check, device):
    """Each block has one or few of a head's pages. Some blocks have the end of one head and the
    start of the next."""
    shape = ("int8", "uniform4", 64, 128, 4, 4, BF16)
    lens, tails = [64 * pages - 5, 70], [q_len + 3, 1]
    case = make_case(lens, q_lens=[q_len, 1], tail_lens=tails, **options_of(shape, device))
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [1, 7, 130])
def test_blocks_share_requests_of_every_width(pages, check, prepare, device):
    """Where one request has more queries than a block takes, pages of requests with few queries
    count less. Memory of the columns that these lack is not read."""
    shape = ("int8", "uniform4", 64, 128, 2, 4, BF16)
    q_lens = [36, 5, 17, 0, 16, 65, 1, 32, 33]
    lens = [64 * pages - b for b in range(len(q_lens))]
    tails = [q_len + b for b, q_len in enumerate(q_lens)]
    case = make_case(lens, q_lens=q_lens, tail_lens=tails, **options_of(shape, device))
    poisoned = dataclasses.replace(case, q=torch.full_like(case.q, torch.nan))
    prepare(poisoned)(*results_for(case))
    check(case)


@pytest.mark.gpu
def test_kernels_share_a_workspace_with_either_way_to_join(prepare, device, monkeypatch):
    """Captured verifications with one max_qo_len share a workspace, in any order."""
    shape = ("int8", "uniform4", 64, 128, 4, 4, BF16)
    sizes = {"q_lens": [9, 2], "tail_lens": [9, 2]}
    case = make_case([64 * 40 - 5, 70], **sizes, **options_of(shape, device))
    workspace = torch.full((1 << 27,), 255, dtype=torch.uint8, device=device)
    runs = []
    for way in WAYS_TO_JOIN:
        join(way, monkeypatch)
        runs.append(prepare(case, workspace=workspace))
    for run in (*runs, *runs, runs[1]):
        out, lse = results_for(case)
        run(out, lse)
        assert_attention(case, out, lse, weights=FP16)


@pytest.mark.parametrize(
    ("codec", "page_size", "head_dim"),
    [("log4", 64, 128), *(("uniform4", *sizes) for sizes in product((64, 128), (64, 128)))],
)
@pytest.mark.parametrize("q_len", [1, 16])
def test_anchors_of_2_bits_give_the_same_bits(codec, page_size, head_dim, q_len, prepare, device):
    """Their halves and corrections hold the 4-bit codes, only in other places."""
    outs, lses = [], []
    for name in (codec, f"{codec}-2bit"):
        options = options_of(("int8", name, page_size, head_dim, 1, 4, BF16), device)
        case = make_case([150], q_lens=[q_len], tail_lens=[q_len], **options)
        out, lse = results_for(case)
        prepare(case, num_sms=2)(out, lse)
        outs.append(out)
        lses.append(lse)
    assert torch.equal(*outs)
    assert torch.equal(*lses)


def test_queries_before_the_tail_see_the_past_only(check, device):
    case = make_case([3, 0], q_lens=[5, 4], tail_lens=[2, 2], **options_of(SHAPES[0], device))
    check(case)


def test_the_first_query_of_a_new_request_sees_itself_only(prepare, device):
    case = make_case([0], q_lens=[3], tail_lens=[3], **options_of(SHAPES[0], device))
    out, lse = results_for(case)
    prepare(case)(out, lse)
    own = case.tail.window_v[case.tail.indices[0].long(), 0]
    assert torch.equal(out[0], own.repeat_interleave(4, dim=0))


def test_tokens_of_no_request_become_empty(prepare, device):
    """A CUDA graph has room for more tokens than a batch may have."""
    case = make_case([70, 3], q_lens=[2, 1], tail_lens=[2, 1], **options_of(SHAPES[0], device))
    padding = torch.full_like(case.q, torch.nan)
    padded = dataclasses.replace(case, q=torch.cat((case.q, padding)))
    out, lse = results_for(padded)
    prepare(padded)(out, lse)
    assert_attention(case, out[:3], lse[:3])
    assert (out[3:] == 0).all()
    assert (lse[3:] == -torch.inf).all()


def test_lengths_change_in_place(prepare, device):
    options = options_of(SHAPES[0], device)
    case = make_case([150, 64, 10], q_lens=[4, 4, 4], tail_lens=[4, 4, 5], **options)
    run = prepare(case, num_sms=4)
    for lens, q_lens in (([150, 64, 10], [4, 4, 4]), ([65, 0, 9], [3, 0, 2])):
        other = case.shortened(lens)
        for name in ("indptr", "indices", "last_page_len"):
            getattr(case, name).copy_(getattr(other, name))
        case.qo_indptr[1:] = torch.tensor(q_lens).cumsum(0)
        case.tail.lens.copy_(torch.tensor(q_lens))
        out, lse = results_for(case)
        run(out, lse)
        num_tokens = sum(q_lens)
        used = dataclasses.replace(case, q=case.q[:num_tokens])
        assert_attention(used, out[:num_tokens], lse[:num_tokens])
        assert (out[num_tokens:] == 0).all()


# CUDA kernels decode to fp16, so they cannot hold such values.
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e4, 1e10], ids=str)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("codec", ["uniform4", "uniform4-2bit"])
def test_values_of_any_size(codec, part, size, check, device):
    shape = ("int8", codec, 64, 64, 1, 4, BF16)
    case = make_case([70, 5], q_lens=[3, 1], **options_of(shape, device))
    layout = formats.anchor_layout(case.settings, 64, 64)
    for name in ("scale", "zero"):
        layout[f"{part}_{name}"].view(case.anchors).mul_(size)
    if part == "k":
        case.q.div_(size)
    check(case)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("sm_scale", [-0.125, 0.0])
def test_scales_that_are_not_positive(sm_scale, check, device):
    case = make_case([70, 5], q_lens=[3, 1], tail_lens=[3, 1], **options_of(SHAPES[1], device))
    check(case, sm_scale=sm_scale)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_values_at_the_end_of_bf16_stay_finite(prepare, device):
    """A value that is more than bf16 has, as scales are rounded. One token: sums of several such
    values are more than fp32 has."""
    case = make_case([1], source="int8", settings=Uniform4Settings(), dtype=BF16, device=device)
    layout = formats.anchor_layout(case.settings, 64, 64)
    for name, value in (("zero", 3.3e38), ("scale", 2e36)):
        layout[f"v_{name}"].view(case.anchors).fill_(value)
    out, lse = results_for(case)
    prepare(case)(out, lse)
    assert out.isfinite().all()
    assert out.max() == torch.finfo(BF16).max


def test_values_at_the_end_of_fp16_stay_finite(prepare, device):
    """A centre of 62720 and a scale of 2816 overflow fp16. The sum is clamped, as in the codec."""
    case = make_case([64], source="int8", settings=Log4Settings(), dtype=FP16, device=device)
    layout = formats.anchor_layout(case.settings, 64, 64)
    pages = case.indices.long()
    top = torch.tensor(2816.0).view(torch.int32).item() >> 19
    for name, value in (("v_centre", 62720.0), ("v_scale", 0)):
        layout[name].view(case.anchors)[pages] = value
    layout["scale_base"].view(case.anchors)[pages, :, 1] = top
    out, lse = results_for(case)
    prepare(case)(out, lse)
    assert out.isfinite().all()
    assert out.max() > 60000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "int4"}, "target must be exact or int8, got 'int4'"),
        ({"kv_dtype": FP32}, "kv_dtype must be torch.bfloat16, like q_dtype, got torch.float32"),
        ({"max_qo_len": 66}, "max_qo_len must be at most 65, got 66"),
        ({"max_qo_len": 0}, "max_qo_len must be at least 1, got 0"),
        ({"expected_batch": 0}, "expected_batch must be 1 to 3, got 0"),
        ({"expected_batch": 4}, "expected_batch must be 1 to 3, got 4"),
        ({"qo_indptr": torch.zeros(2, dtype=torch.int32)}, r"qo_indptr must have shape \[4\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_plans_that_are_refused(changes, message, device):
    index = torch.zeros(4, dtype=torch.int32, device=device)
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 64}
    index_tensors = {"indptr": index, "indices": index, "last_page_len": index[:3]}
    options = {"qo_indptr": index, **index_tensors, **sizes, "settings": Log4Settings()}
    options |= {"q_dtype": BF16, "max_qo_len": 4, "target": "int8"}
    changes = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in changes.items()
    }
    attention = VerifyAttention(torch.empty(1 << 26, dtype=torch.uint8, device=device))
    attention.plan(**options)
    with pytest.raises(ValueError, match=message):
        attention.plan(**(options | changes))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("anchors", None, "anchors must be given for the int8 source"),
        ("residuals", None, "residuals must be given for the int8 source"),
        ("residual_slots", None, "residual_slots must be given for the int8 source"),
        ("residual_slots", torch.zeros(4), "residual_slots must be torch.int32"),
    ],
)
def test_records_that_are_refused(name, value, message, device):
    case = make_case([70], q_lens=[2], **options_of(SHAPES[0], device))
    attention = VerifyAttention(torch.empty(1 << 26, dtype=torch.uint8, device=device))
    attention.plan(
        case.qo_indptr,
        case.indptr,
        case.indices,
        case.last_page_len,
        *(8, 2, 64, 64),
        settings=case.settings,
        target="int8",
        q_dtype=BF16,
        max_qo_len=2,
    )
    names = ("q", "anchors", "residuals", "residual_slots")
    given = {key: getattr(case, key) for key in names}
    value = value.to(device) if isinstance(value, torch.Tensor) else value
    with pytest.raises(ValueError, match=message):
        attention.run(**(given | {name: value}))


def test_pairs_of_a_tails_k_are_loaded_at_once_where_they_are_aligned():
    window = torch.zeros(2, 64, 2, 66, dtype=BF16)
    assert tail_aligned(window)
    assert tail_aligned(window[..., 2:])
    assert not tail_aligned(window[..., 1:])
    assert not tail_aligned(torch.zeros(2, 64, 2, 65, dtype=BF16)[..., :64])
