"""ReferenceAttention at the target precision, compared with dense attention over the true
values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime import reference_attention

TOKENS = 150
PAGES = [7, 2, 9, 4, 11, 1, 8, 3]

# Codec, page_size, head_dim, queries per KV head.
SHAPES = [
    ("log4", 32, 16, 1),
    ("uniform4", 32, 16, 2),
    ("log4", 32, 64, 4),
    ("uniform4", 64, 64, 1),
    ("log4", 64, 16, 4),
]
shapes = pytest.mark.parametrize(("codec", "page_size", "head_dim", "group"), SHAPES)
targets = pytest.mark.parametrize("target", ["exact", "int8"])


@st.composite
def cuts(draw: st.DrawFn, end: int = TOKENS) -> list[int]:
    """Draw the ends of chunks of a prompt of `end` tokens, often on page boundaries."""
    at_pages = st.sampled_from([31, 32, 33, 64, 65, 96])
    places = st.integers(1, end - 1) | at_pages
    return [0, *sorted(draw(st.sets(places, max_size=5))), end]


@shapes
@targets
@settings(max_examples=6)
@given(
    prompt=cuts(100),
    lengths=st.lists(st.integers(1, 40), min_size=60, max_size=60),
    recent_pages=st.integers(1, 3),
    cache_pages=st.integers(0, 8),
)
def test_prefill_and_verify_in_any_pieces_read_the_target(
    make_kv,
    attention_lab,
    assert_attention,
    codec,
    page_size,
    head_dim,
    group,
    target,
    prompt,
    lengths,
    recent_pages,
    cache_pages,
):
    kv = make_kv(
        codec=codec, target=target, page_size=page_size, head_dim=head_dim, cache_pages=cache_pages
    )
    story = attention_lab.Story(kv, PAGES, TOKENS, group)
    driver = attention_lab.Driver(kv, recent_pages)
    out = [driver.prefill(story, prompt)]
    start = prompt[-1]
    for length in lengths:
        length = min(length, TOKENS - start)
        if length:
            out.append(driver.verify(story, start, length))
            start += length
    exact = attention_lab.target_attention(kv, story, 0)
    assert_attention(torch.cat(out, dim=1)[0], exact)


@pytest.mark.parametrize("codec", ["log4", "uniform4"])
def test_what_an_int8_token_reads_depends_on_its_position_alone(
    make_kv, attention_lab, assert_attention, codec
):
    outputs = []
    for prompt, step, recent_pages, store in (
        ([0, 97], 1, 1, True),
        ([0, 31, 32, 64, 97], 7, 2, True),
        ([0, 1, 96, 97], 53, 3, False),
    ):
        kv = make_kv(codec=codec, target="int8", store=store, cache_pages=None if not store else 1)
        story = attention_lab.Story(kv, PAGES, TOKENS, group=2)
        driver = attention_lab.Driver(kv, recent_pages)
        parts = [driver.prefill(story, prompt)]
        for start in range(97, TOKENS, step):
            parts.append(driver.verify(story, start, min(step, TOKENS - start)))
        outputs.append(torch.cat(parts, dim=1))
    for other in outputs[1:]:
        assert_attention(other, outputs[0])
    # Eight bits are not exact: without this check the comparison above would pass if the codec were
    # never used.
    raw = attention_lab.dense(story.q[0], story.k[0], story.v[0], 0)
    assert (outputs[0][0] - raw).abs().max() > 1e-4


@targets
def test_a_prompt_longer_than_a_block_of_queries(
    make_kv, attention_lab, assert_attention, monkeypatch, target
):
    monkeypatch.setattr(reference_attention, "PREFILL_BLOCK", 7)
    kv = make_kv(target=target)
    story = attention_lab.Story(kv, PAGES, 90, group=2)
    out = attention_lab.Driver(kv).prefill(story, [0, 40, 90])
    assert_attention(out[0], attention_lab.target_attention(kv, story, 0))


@targets
def test_layers_and_requests_of_one_forward_do_not_mix(
    make_kv, attention_lab, assert_attention, target
):
    kv = make_kv(target=target, num_layers=2, cache_pages=2)
    driver = attention_lab.Driver(kv)
    stories = [
        attention_lab.Story(kv, pages, tokens, group=2, seed=seed)
        for seed, (pages, tokens) in enumerate((([5, 3, 8], 80), ([1, 9, 2, 6], 110)))
    ]
    first, second = stories
    out_first = [driver.prefill(first, [0, 70])]
    # The prompt of one request is in a forward with a verification of the other, in either order.
    for a_row, b_row in (((70, 5), (0, 50)), ((75, 5), (50, 60))):
        rows = [
            (first, first.row(RowKind.VERIFY, *a_row)),
            (second, second.prefill(b_row[0], sum(b_row), 1)),
        ]
        outputs = driver.forward(*(rows if a_row[0] == 70 else rows[::-1]))
        out_first.append(outputs[0 if a_row[0] == 70 else 1])
        if b_row[0] == 0:
            out_second = [outputs[1]]
        else:
            out_second.append(outputs[0])
        driver.keeper.commit(second.pages_to(sum(b_row)), b_row[0], sum(b_row))
        driver.keeper.commit(first.pages_to(sum(a_row)), a_row[0], sum(a_row))
        driver.keeper.flush()
    for story, parts in ((first, out_first), (second, out_second)):
        for layer in range(2):
            exact = attention_lab.target_attention(kv, story, layer)
            assert_attention(torch.cat(parts, dim=1)[layer], exact)


def test_a_verification_reads_nothing_of_drafts_that_were_there_before(
    make_kv, attention_lab, assert_attention
):
    kv = make_kv()
    driver = attention_lab.Driver(kv)
    truth = attention_lab.Story(kv, PAGES, 80, group=2)
    wrong = attention_lab.Story(kv, PAGES, 80, group=2, seed=1)
    driver.prefill(truth, [0, 60])
    start = 60
    for num_drafts, kept in ((6, 2), (5, 0), (8, 8)):
        for position in range(start, start + num_drafts):
            driver.forward((wrong, wrong.row(RowKind.DRAFT, position, 1)))
        row = truth.row(RowKind.VERIFY, start, num_drafts + 1)
        (out,) = driver.forward((truth, row))
        assert_attention(out[0], attention_lab.target_attention(kv, truth, 0)[start : row.end])
        driver.keeper.commit(truth.pages_to(row.end), start, start + kept + 1)
        driver.keeper.flush()
        start += kept + 1


@pytest.mark.parametrize("seen", [None, torch.tensor([0, 2, 3])])
def test_a_draft_leaves_pages_without_anchors_out(make_kv, attention_lab, assert_attention, seen):
    kv = make_kv(anchor_pages=3)
    story, driver = attention_lab.Story(kv, PAGES, 140, group=2), attention_lab.Driver(kv)
    driver.prefill(story, [0, 130])
    # Page 3 of the request is in the window, which has no anchors yet.
    kv.free_anchors([PAGES[1], PAGES[3]])
    read = [0, 2, 3]
    row = Row(RowKind.DRAFT, 130, 1, story.pages_to(131), seen=seen)
    (out,) = driver.forward((story, row))
    coded = story.with_codec(kv, 0, anchor_only=True)
    parts = []
    for part, raw in zip(coded, (story.k[0], story.v[0]), strict=True):
        pages = [(raw if page == 3 else part)[32 * page : 32 * page + 32] for page in read]
        parts.append(torch.cat([*pages, raw[128:131]]))
    expected = attention_lab.dense(story.q[0, 130:131], *parts, len(parts[0]) - 1)
    assert_attention(out[0], expected)
    assert not kv.anchor_places.have(torch.tensor(PAGES[1]))
    kv.check_integrity()


def test_a_cached_prefix_of_another_request_is_read_at_the_target(
    make_kv, attention_lab, assert_attention
):
    kv = make_kv(target="int8", cache_pages=1)
    driver = attention_lab.Driver(kv)
    first = attention_lab.Story(kv, PAGES[:3], 96)
    driver.prefill(first, [0, 96])
    driver.keeper.retire(first.pages)
    assert all(kv.is_encoded(page) for page in PAGES[:3])
    second = attention_lab.Story(kv, [*PAGES[:2], 12, 6], 120, seed=1)
    second.k[:, :64], second.v[:, :64] = first.k[:, :64], first.v[:, :64]
    (out,) = driver.forward((second, second.prefill(64, 120, 1)))
    assert_attention(out[0], attention_lab.target_attention(kv, second, 0)[64:])


def test_bf16_stays_close_to_attention_in_fp32(make_kv, attention_lab):
    kv = make_kv(dtype=torch.bfloat16, head_dim=64)
    story = attention_lab.Story(kv, PAGES, 100, group=2)
    out = attention_lab.Driver(kv).prefill(story, [0, 45, 100])[0].float()
    exact = attention_lab.dense(story.q[0].float(), story.k[0].float(), story.v[0].float(), 0)
    # Inputs are the same bf16 values. The weights and the output are rounded to 8 bits.
    assert (out - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()


def test_forwards_out_of_turn_are_refused(make_kv, attention_lab):
    kv = make_kv()
    driver = attention_lab.Driver(kv)
    story = attention_lab.Story(kv, PAGES, 10)
    plan = ForwardPlan((story.row(RowKind.VERIFY, 0, 4),))
    tokens = (story.q[0, :4], story.k[0, :4], story.v[0, :4])
    with pytest.raises(AssertionError, match="outside of planned"):
        driver.attention.forward(0, *tokens, 1.0)
    with driver.attention.planned(plan):
        with (
            pytest.raises(AssertionError, match="has not finished"),
            driver.attention.planned(plan),
        ):
            pytest.fail("a forward began inside of another")
        with pytest.raises(AssertionError, match="another number of tokens than its plan"):
            driver.attention.forward(0, *(t[:3] for t in tokens), 1.0)
