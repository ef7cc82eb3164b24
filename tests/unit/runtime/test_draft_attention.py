"""Draft rows read decoded anchors, and the recent window in full precision."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.kv.forward_plan import Row, RowKind

PAGES = [7, 2, 9, 4, 11, 1]


def anchors_and_window(kv, story, layer, num_tokens):
    """Return k, v [num_tokens, ...]: decoded anchors of encoded pages, raw values of the others."""
    size = story.page_size
    coded = story.with_codec(kv, layer, anchor_only=True)
    encoded = torch.tensor([kv.is_encoded(p) for p in story.pages.tolist()])
    by_token = encoded.repeat_interleave(size)[:num_tokens, None, None]
    raw = story.k[layer], story.v[layer]
    return [
        torch.where(by_token, c[:num_tokens], r[:num_tokens])
        for c, r in zip(coded, raw, strict=True)
    ]


@pytest.mark.parametrize("codec", ["log4", "uniform4"])
@pytest.mark.parametrize("target", ["exact", "int8"])
@pytest.mark.parametrize(
    ("page_size", "head_dim", "group", "recent_pages"),
    [(32, 16, 1, 1), (32, 64, 2, 2), (64, 16, 4, 1)],
)
def test_drafts_attend_over_anchors_and_the_window(
    make_kv,
    attention_lab,
    assert_attention,
    codec,
    target,
    page_size,
    head_dim,
    group,
    recent_pages,
):
    kv = make_kv(codec=codec, target=target, page_size=page_size, head_dim=head_dim, num_layers=2)
    # The last page is full, too, so that every page has an anchor.
    story = attention_lab.Story(kv, PAGES, 6 * page_size, group)
    driver = attention_lab.Driver(kv, recent_pages)
    prompt = 4 * page_size - 5
    driver.prefill(story, [0, page_size + 3, prompt])
    # Enough drafts to fill a page and enter the next.
    for position in range(prompt, prompt + 9):
        (out,) = driver.forward((story, story.row(RowKind.DRAFT, position, 1)))
        for layer in range(2):
            seen = anchors_and_window(kv, story, layer, position + 1)
            exact = attention_lab.dense(story.q[layer, position : position + 1], *seen, position)
            assert_attention(out[layer], exact)
    assert sum(kv.is_encoded(p) for p in PAGES) == 3 - recent_pages


def test_a_draft_is_not_the_target(make_kv, attention_lab):
    kv = make_kv()
    story = attention_lab.Story(kv, PAGES, 150)
    driver = attention_lab.Driver(kv)
    driver.prefill(story, [0, 149])
    (draft,) = driver.forward((story, story.row(RowKind.DRAFT, 149, 1)))
    exact = attention_lab.dense(story.q[0, 149:], story.k[0], story.v[0], 149)
    error = (draft[0] - exact).abs().max()
    assert 1e-3 < error < 0.5


def test_drafts_need_no_residuals(make_kv, attention_lab):
    kv = make_kv(cache_pages=0)
    story = attention_lab.Story(kv, PAGES, 150)
    driver = attention_lab.Driver(kv)
    driver.prefill(story, [0, 140])
    before = kv.residuals.bytes_streamed
    for position in range(140, 150):
        driver.forward((story, story.row(RowKind.DRAFT, position, 1)))
    assert kv.residuals.bytes_streamed == before
    driver.verify(story, 140, 10)
    assert kv.residuals.bytes_streamed > before


def test_a_draft_row_and_a_verify_row_of_one_forward_read_their_own_kind(
    make_kv, attention_lab, assert_attention
):
    kv = make_kv(target="int8", window_pages=8)
    driver = attention_lab.Driver(kv)
    drafting = attention_lab.Story(kv, [1, 2, 3, 4], 128, group=2)
    verifying = attention_lab.Story(kv, [5, 6, 7, 8], 120, group=2, seed=1)
    driver.prefill(drafting, [0, 100])
    driver.prefill(verifying, [0, 110])
    draft, verified = driver.forward(
        (drafting, drafting.row(RowKind.DRAFT, 100, 1)),
        (verifying, verifying.row(RowKind.VERIFY, 110, 10)),
    )
    seen = anchors_and_window(kv, drafting, 0, 101)
    assert_attention(draft[0], attention_lab.dense(drafting.q[0, 100:101], *seen, 100))
    assert_attention(verified[0], attention_lab.target_attention(kv, verifying, 0)[110:])


def test_heads_of_layers_read_pages_of_their_own(make_kv, attention_lab, assert_attention):
    size, position = 32, 5 * 32 + 7
    kv = make_kv(page_size=size, num_layers=2)
    story = attention_lab.Story(kv, PAGES, 6 * size, group=2)
    attention_lab.Driver(kv, recent_pages=2).prefill(story, [0, position])
    # The last two pages are in the window.
    seen = torch.tensor([[[0, 2, 4], [1, 2, 3]], [[0, 1, 3], [0, 3, 4]]])
    row = Row(RowKind.DRAFT, position, 1, story.pages_to(position + 1), seen=seen)
    (out,) = attention_lab.Driver(kv).forward((story, row))
    for layer, head in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
        tokens = [n for n in range(position + 1) if n // size in {*seen[layer, head].tolist(), 5}]
        k, v = (
            part[tokens, head : head + 1]
            for part in anchors_and_window(kv, story, layer, position + 1)
        )
        mine = slice(2 * head, 2 * head + 2)
        q = story.q[layer, position : position + 1, mine]
        assert_attention(out[layer][:, mine], attention_lab.dense(q, k, v, len(k) - 1))


@pytest.mark.parametrize("length", [1, 3])
def test_heads_of_layers_read_tokens_of_their_own(make_kv, attention_lab, assert_attention, length):
    size, position = 32, 5 * 32 + 7
    kv = make_kv(page_size=size, num_layers=2)
    story = attention_lab.Story(kv, PAGES, 6 * size, group=2)
    attention_lab.Driver(kv, recent_pages=2).prefill(story, [0, position])
    mask = torch.rand((2, 2, 5 * size), generator=torch.Generator().manual_seed(3)) < 0.2
    # One head reads no past token at all.
    mask[1, 0] = False
    end = position + length
    row = Row(RowKind.DRAFT, position, length, story.pages_to(end), seen=mask)
    (out,) = attention_lab.Driver(kv).forward((story, row))
    for layer, head in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
        past = mask[layer, head].nonzero().flatten().tolist()
        tokens = [*past, *range(5 * size, end)]
        k, v = (part[tokens, head : head + 1] for part in anchors_and_window(kv, story, layer, end))
        mine = slice(2 * head, 2 * head + 2)
        q = story.q[layer, position:end, mine]
        wanted = attention_lab.dense(q, k, v, len(k) - length)
        assert_attention(out[layer][:, mine], wanted)


def test_a_repeat_row_reads_the_target_and_writes_nothing(make_kv, attention_lab, assert_attention):
    kv = make_kv(page_size=32)
    story = attention_lab.Story(kv, PAGES, 160, group=2)
    driver = attention_lab.Driver(kv)
    driver.prefill(story, [0, 100])
    encoded = [kv.is_encoded(page) for page in PAGES]
    before = [part.clone() for part in kv.window.read(0, story.pages[3:4])]
    row = Row(RowKind.REPEAT, 100, 40, story.pages_to(100))
    (out,) = driver.forward((story, row))
    assert_attention(out[0], attention_lab.target_attention(kv, story, 0)[100:140])
    assert [kv.is_encoded(page) for page in PAGES] == encoded
    for part, old in zip(kv.window.read(0, story.pages[3:4]), before, strict=True):
        torch.testing.assert_close(part, old, atol=0, rtol=0, equal_nan=True)
    kv.check_integrity()
