"""Division of a memory budget into pages: no limit is exceeded, almost nothing is wasted, and the
plan names its limit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sglang_kvspec.codecs import make_codec
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.capacity import (
    ALL_HAVE_ANCHORS,
    AnchorShare,
    PageBytes,
    kept_anchor_pages_for,
    pages_of_one_request,
    plan_capacity,
    split_shared_memory,
    window_pages_for,
)

GIB = 2**30
PLENTY = 2**70

page_sizes = st.builds(
    PageBytes,
    plain=st.integers(1000, 10**7),
    anchor=st.integers(100, 10**6),
    residual=st.integers(100, 10**7),
)
fractions = st.floats(0, 0.9)


def plan(budget, page, *, window=0, fraction=0.25, host=None, host_limit=PLENTY, **limits):
    return plan_capacity(
        budget,
        page,
        window_pages=window,
        residual_fraction=fraction,
        host_bytes=host,
        host_limit_bytes=host_limit,
        **limits,
    )


def plan_or_reject(*args, **kwargs):
    """Return the plan of a generated budget, or skip the example if not one page fits."""
    try:
        return plan(*args, **kwargs)
    except ConfigError:
        assume(False)


@given(
    budget=st.integers(2**30, 2**40),
    page=page_sizes,
    window=st.integers(0, 100),
    fraction=fractions,
    host=st.none() | st.just(0) | st.integers(2**24, 2**42),
    host_limit=st.integers(2**24, 2**42),
    max_pages=st.none() | st.integers(1, 10**6),
    least=st.integers(0, 10**4),
    kept=fractions,
    share=st.none() | st.floats(0.02, 1),
    of_prompt=st.integers(0, 10**4),
)
def test_no_limit_is_exceeded(
    budget, page, window, fraction, host, host_limit, max_pages, least, kept, share, of_prompt
):
    kept_pages = kept_anchor_pages_for(budget, page, window, kept)
    made = plan_or_reject(
        budget,
        page,
        window=window,
        fraction=fraction,
        host=host,
        host_limit=host_limit,
        max_pages=max_pages,
        min_cache_pages=least,
        kept_anchor_pages=kept_pages,
        anchors=ALL_HAVE_ANCHORS if share is None else AnchorShare(share, of_prompt),
    )
    if share is None:
        assert made.anchor_pages == made.num_pages
    else:
        wanted = share * made.num_pages + of_prompt
        assert min(wanted, made.num_pages) <= made.anchor_pages <= min(wanted + 1, made.num_pages)
    assert made.num_pages >= 1
    assert made.kept_anchor_pages == kept_pages
    assert made.hbm_bytes <= budget
    assert made.host_bytes <= (host_limit if host is None else host)
    assert made.host_pages == (0 if host == 0 else made.num_pages)
    assert min(least, made.num_pages) <= made.cache_pages <= made.num_pages
    assert made.window_pages == window
    if max_pages is not None:
        assert made.num_pages <= max_pages
    assert made.plain_pages * page.plain <= made.hbm_bytes


@given(
    bytes_=st.integers(0, 2**40),
    anchor=st.integers(1, 10**6),
    beside=st.integers(0, 10**7),
    share=st.floats(0.02, 1),
    least=st.integers(0, 10**4),
)
# Rounded products and divisions.
@example(bytes_=10**6, anchor=100, beside=0, share=0.1, least=0)
@example(bytes_=10**6, anchor=100, beside=7, share=1 / 3, least=3)
def test_the_most_pages_that_fit(bytes_, anchor, beside, share, least):
    anchors = AnchorShare(share, least)

    def size(num_pages):
        return anchors.pages(num_pages) * anchor + num_pages * beside

    most = anchors.most_pages(bytes_, anchor, beside)
    assert size(most) <= bytes_
    # The share of a page may round to one more page of anchors.
    assert size(most + 1 + int(2 / share)) > bytes_


@given(budget=st.integers(10**6, 2**40), page=page_sizes, fraction=fractions)
# Divisions that are exact in decimal and rounded in binary.
@example(budget=10**7, page=PageBytes(1000, 100, 100), fraction=0.1)
@example(budget=3 * 10**7, page=PageBytes(1000, 300, 100), fraction=0.3)
def test_hardly_anything_is_wasted_when_kv_memory_binds(budget, page, fraction):
    made = plan_or_reject(budget, page, fraction=fraction)
    assert made.binding == "KV memory"
    wasted = budget - made.hbm_bytes
    if made.cache_pages < made.num_pages:
        # Rounding may lose one page of anchors, with its share of cache, and one page of residuals.
        assert wasted <= page.anchor / (1 - fraction) + page.residual + 1


def test_nothing_is_wasted_when_the_cache_could_hold_every_page():
    page = PageBytes(plain=1000, anchor=280, residual=280)
    made = plan(10**6, page, fraction=0.9)
    assert made.cache_pages == made.num_pages
    assert 10**6 - made.hbm_bytes <= page.anchor + page.residual


@pytest.mark.parametrize("limits", [{"max_pages": 100}, {"host": 280 * 100}])
def test_memory_left_over_by_another_limit_caches_residuals(limits):
    page = PageBytes(plain=1000, anchor=280, residual=280)
    made = plan(10**6, page, **limits)
    assert made.num_pages == 100
    assert made.cache_pages == 100


def test_the_longest_request_takes_its_cache_from_the_anchors():
    page = PageBytes(plain=1000, anchor=100, residual=1000)
    budget = 10**6 + page.anchor  # the anchor of the padding page
    assert plan(budget, page, fraction=0.1).cache_pages == 100
    made = plan(budget, page, fraction=0.1, min_cache_pages=500)
    assert (made.num_pages, made.cache_pages) == (5000, 500)
    # Where the cache cannot be that large, no request is longer than the pages that are cached.
    short = plan(budget, page, fraction=0.1, min_cache_pages=950)
    assert short.num_pages == short.cache_pages == 909


def test_pages_of_one_request():
    assert pages_of_one_request(8192, 32, 64) == 128 + 1 + 1
    assert pages_of_one_request(8193, 64, 64) == 129 + 2 + 1


@given(budget=st.integers(10**6, 2**40), page=page_sizes, fraction=fractions)
def test_a_smaller_cache_share_never_holds_fewer_pages(budget, page, fraction):
    made = plan_or_reject(budget, page, fraction=fraction)
    assert plan(budget, page, fraction=0).num_pages >= made.num_pages


@given(budget=st.integers(10**6, 2**40), page=page_sizes, fraction=fractions)
def test_without_a_store_every_residual_is_in_kv_memory(budget, page, fraction):
    made = plan_or_reject(budget, page, fraction=fraction, host=0, host_limit=0)
    assert made.cache_pages == made.num_pages
    assert made.host_pages == made.host_bytes == 0
    assert made.binding == "KV memory"
    assert budget - made.hbm_bytes < page.anchor + page.residual


@given(page=page_sizes, pages=st.integers(1, 500), slack=st.floats(0, 0.99))
def test_a_small_store_binds(page, pages, slack):
    host = int(page.residual * (pages + slack))
    budget = 20 * (pages + 1) * page.anchor
    for made in (
        plan(budget, page, fraction=0.5, host=host, host_limit=0),
        plan(budget, page, fraction=0.5, host_limit=host),
    ):
        assert made.num_pages == made.host_pages == pages
        assert made.binding == "host memory"


def test_the_store_is_no_larger_than_its_pages_need():
    page = PageBytes(1000, 250, 1000)
    assert plan(10**6, page, host=PLENTY).host_bytes == plan(10**6, page).num_pages * page.residual


def test_max_pages_caps_and_is_named():
    page = PageBytes(1000, 250, 1000)
    free = plan(10**6, page)
    capped = plan(10**6, page, max_pages=free.num_pages - 1)
    assert (capped.num_pages, capped.binding) == (free.num_pages - 1, "--max-total-tokens")
    above = plan(10**6, page, max_pages=free.num_pages + 1)
    assert (above.num_pages, above.binding) == (free.num_pages, "KV memory")


@pytest.mark.parametrize("host", [None, 0])
def test_too_little_kv_memory_says_what_to_change(host):
    page = PageBytes(plain=2**20, anchor=2**18, residual=2**20)
    for budget, window in ((page.anchor, 1), (10 * page.plain, 11), (0, 0)):
        with pytest.raises(ConfigError, match="--mem-fraction-static") as caught:
            plan(budget, page, window=window, host=host)
        assert f"window of {window} pages" in str(caught.value)


def test_too_little_host_memory_says_what_to_change():
    page = PageBytes(plain=2**20, anchor=2**18, residual=2**20)
    with pytest.raises(ConfigError, match="--kvspec-host-gb leaves no room"):
        plan(GIB, page, host=page.residual - 1)


def test_a_token_limit_below_one_page_names_its_flag():
    with pytest.raises(ConfigError, match="--max-total-tokens"):
        plan(GIB, PageBytes(1000, 250, 1000), max_pages=0)


def llama_8b(codec_name: str, target: str = "exact") -> PageBytes:
    codec = make_codec(codec_name, target=target, page_size=64, head_dim=128, dtype=torch.bfloat16)
    records = 32 * 8
    return PageBytes(
        plain=2 * 64 * 128 * records * 2,
        anchor=records * codec.anchor_bytes,
        residual=records * codec.residual_bytes,
    )


@pytest.mark.parametrize("codec", ["log4", "uniform4"])
def test_llama_8b_holds_more_than_3_3_times_the_tokens(codec):
    window = window_pages_for(48, recent_pages=1, max_draft_len=32, page_size=64)
    made = plan(80 * GIB, llama_8b(codec), window=window, fraction=0.0)
    assert made.num_pages >= 3.3 * made.plain_pages
    assert made.cache_pages == 0


def test_freed_anchors_let_six_times_the_tokens_fit():
    """With the cache that a request of 40,960 tokens needs. Then host memory is the limit."""
    window = window_pages_for(16, recent_pages=1, max_draft_len=32, page_size=64)
    least = pages_of_one_request(40_960, 32, 64)
    budget, page = 24 * GIB, llama_8b("uniform4")
    limits = {"window": window, "min_cache_pages": least}

    def times(host, **anchors):
        made = plan(budget, page, **limits, host=host, **anchors)
        assert made.cache_pages >= least
        return made.num_pages / made.plain_pages, made.host_bytes / GIB

    shares = {"anchors": AnchorShare(0.2, least)}
    assert times(PLENTY) == pytest.approx((2.69, 64.4), rel=0.01)
    assert times(PLENTY, **shares) == pytest.approx((12.5, 301), rel=0.01)
    assert times(150 * GIB, **shares) == pytest.approx((6.25, 150), rel=0.01)


@pytest.mark.parametrize("codec", ["log4", "uniform4"])
def test_int8_without_a_store_still_holds_more_than_plain(codec):
    window = window_pages_for(48, recent_pages=1, max_draft_len=32, page_size=64)
    made = plan(80 * GIB, llama_8b(codec, "int8"), window=window, host=0)
    assert made.num_pages >= 1.8 * made.plain_pages


@given(budget=st.integers(10**7, 2**40), page=page_sizes, fraction=fractions)
def test_shared_memory_is_split_so_that_both_sides_hold_the_same_pages(budget, page, fraction):
    kv_bytes, host_bytes = split_shared_memory(budget, page, 0, fraction)
    assert kv_bytes + host_bytes == budget
    made = plan_or_reject(kv_bytes, page, fraction=fraction, host_limit=host_bytes)
    assert made.hbm_bytes + made.host_bytes <= budget
    by_host = host_bytes // page.residual
    by_kv = plan(kv_bytes, page, fraction=fraction).num_pages
    assert abs(by_host - by_kv) <= 1


@given(
    budget=st.integers(10**7, 2**40),
    page=page_sizes,
    window=st.integers(0, 9),
    fraction=fractions,
    share=st.floats(0.02, 1),
    least=st.integers(0, 10**4),
)
def test_shared_memory_never_holds_fewer_pages_without_some_anchors(
    budget, page, window, fraction, share, least
):
    def pages(anchors):
        kv_bytes, host_bytes = split_shared_memory(budget, page, window, fraction, anchors)
        assert kv_bytes + host_bytes == budget
        made = plan_or_reject(
            kv_bytes, page, window=window, fraction=fraction, host_limit=host_bytes, anchors=anchors
        )
        assert made.hbm_bytes + made.host_bytes <= budget
        return made.num_pages

    assert pages(AnchorShare(share, least)) >= pages(ALL_HAVE_ANCHORS)


def test_shared_memory_smaller_than_the_window_goes_to_kv_memory():
    page = PageBytes(1000, 250, 1000)
    assert split_shared_memory(5000, page, 6, 0.25) == (5000, 0)
    with pytest.raises(ConfigError, match="recent window of 6 pages"):
        plan(5000, page, window=6, host_limit=0)


@given(
    recent=st.integers(1, 4),
    max_draft_len=st.integers(0, 64),
    page_size=st.sampled_from([32, 64, 128]),
    num_requests=st.integers(1, 500),
)
def test_the_window_holds_the_worst_case_of_every_request(
    recent, max_draft_len, page_size, num_requests
):
    # The pending token and all drafts may be written while `filled` tokens of a page are verified.
    written = max((filled + max_draft_len) // page_size + 1 for filled in range(page_size))
    pages = window_pages_for(num_requests, recent, max_draft_len, page_size)
    assert pages >= num_requests * (recent + written)
    # One page of slack for each request when nothing is drafted, and none otherwise.
    assert pages - num_requests * (recent + written) <= (num_requests if max_draft_len == 0 else 0)


@given(budget=st.integers(10**6, 2**40), page=page_sizes, window=st.integers(0, 9), share=fractions)
def test_kept_anchors_take_their_share_of_what_the_window_leaves(budget, page, window, share):
    rest = budget - window * page.plain
    kept_bytes = kept_anchor_pages_for(budget, page, window, share) * page.anchor
    assert kept_bytes <= max(rest, 0) * share
    assert kept_bytes > rest * share - page.anchor - 1


def test_memory_that_kept_anchors_leave_must_hold_a_page():
    with pytest.raises(ConfigError, match="one page"):
        plan(10_000, PageBytes(4000, 1000, 4000), host=0, kept_anchor_pages=5)
    made = plan(10_000, PageBytes(4000, 1000, 4000), host=0, kept_anchor_pages=4)
    assert (made.num_pages, made.hbm_bytes) == (1, 10_000)


def test_the_anchor_of_the_padding_page_is_planned():
    page = PageBytes(plain=1000, anchor=250, residual=1000)
    made = plan(5 * 1250 + 250, page, host=0)
    assert (made.num_pages, made.hbm_bytes) == (5, 5 * 1250 + 250)
    assert plan(5 * 1250 + 249, page, host=0).num_pages == 4


def test_a_window_that_takes_most_of_the_memory_is_named():
    page = PageBytes(plain=1000, anchor=250, residual=1000)
    half = plan(200_000, page, window=100)
    assert half.binding == "recent window"
    # The window takes less than half, but more than encoding saves.
    lossy = PageBytes(plain=1000, anchor=700, residual=1000)
    saved = plan(1_000_000, lossy, window=400, fraction=0)
    assert saved.binding == "recent window"
    assert saved.num_pages < saved.plain_pages
    assert plan(1_000_000, page, window=100).binding == "KV memory"
    assert plan(200_000, page, window=100, max_pages=8).binding == "--max-total-tokens"


def test_residuals_in_kv_memory_are_not_blamed_on_the_window():
    page = PageBytes(plain=1000, anchor=300, residual=1000)
    made = plan(1_000_000, page, window=10, host=0)
    assert made.num_pages < made.plain_pages
    assert made.binding == "KV memory"
