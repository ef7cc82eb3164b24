"""Division of a GPU's memory with and without a host store."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters import pool_sizing
from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.planning.capacity import PageBytes, pages_of_one_request, window_pages_for

GIB = 2**30
PAGE = PageBytes(plain=8 * 2**20, anchor=2 * 2**20, residual=8 * 2**20)


@pytest.mark.parametrize("frees", [False, True])
def test_a_packed_page_takes_its_anchors_along_where_they_may_be_freed(frees):
    sizes = {"page_size": 64, "head_dim": 128, "dtype": torch.bfloat16}
    codec = make_codec("uniform4", target="exact", packs=True, **sizes)
    page = pool_sizing.page_bytes_of(
        KVGeometry(32, 8, 128, 64, torch.bfloat16), codec, on_gpu=True, frees_anchors=frees
    )
    assert page.stored == 4_485_120 + frees * page.anchor
    assert page.takes_anchors == frees
    raw = replace(codec, packs=False)
    for is_so in (False, True):
        geometry = KVGeometry(32, 8, 128, 64, torch.bfloat16)
        same = pool_sizing.page_bytes_of(geometry, raw, on_gpu=True, frees_anchors=is_so)
        assert same.stored == same.residual
        assert not same.takes_anchors


@pytest.fixture
def plan_on_gpu(monkeypatch):
    """Return a function that plans 40 GiB of KV memory for a context of 32768 tokens."""
    geometry = SimpleNamespace(page_size=64)
    monkeypatch.setattr(pool_sizing, "geometry_of", lambda kvc: geometry)
    monkeypatch.setattr(pool_sizing, "codec_of", lambda kvc, config: None)
    monkeypatch.setattr(pool_sizing, "least_of_all_ranks", lambda value: value)
    monkeypatch.setattr(pool_sizing, "page_bytes_of", lambda geometry, codec, **_: PAGE)

    def make(max_pages=None, budget=40 * GIB, context_len=32768, **options):
        kvc = SimpleNamespace(
            device="cuda",
            server_args=SimpleNamespace(max_running_requests=8, tp_size=1, nnodes=1),
            model_config=SimpleNamespace(context_len=context_len),
        )
        sizing = object.__new__(pool_sizing.KVSpecPoolConfigurator)
        sizing._kvc, sizing._config = kvc, KVSpecConfig(**options)
        sizing._budget_bytes = budget
        sizing._plan(max_pages)
        return pool_sizing.take_plan(kvc)

    return make


def test_copies_of_pages_need_memory_of_a_gpu(plan_on_gpu, monkeypatch):
    sizes = []
    for options, mode, page in (
        ({}, "null", PAGE),
        ({}, "decode", PAGE),
        ({"prefix_host_gb": 1}, "null", PAGE),
        ({"prefix_host_gb": 1}, "null", replace(PAGE, residual=GIB)),
    ):
        monkeypatch.setattr(pool_sizing, "page_bytes_of", lambda g, codec, page=page, **_: page)
        kvc = SimpleNamespace(
            device="cuda",
            server_args=SimpleNamespace(max_running_requests=8, disaggregation_mode=mode),
            model_config=SimpleNamespace(dtype=torch.bfloat16, vocab_size=1000),
        )
        sizing = object.__new__(pool_sizing.KVSpecPoolConfigurator)
        sizing._kvc, sizing._config = kvc, KVSpecConfig(draft_view="all", **options)
        sizes.append(sizing._outside_bytes())
    assert [size - sizes[0] for size in sizes] == [0, 64 * 2**20, 64 * 2**20, GIB]


def test_a_choice_of_pages_needs_memory_of_a_gpu(monkeypatch):
    geometry = KVGeometry(4, 2, 64, 64, torch.bfloat16)
    monkeypatch.setattr(pool_sizing, "geometry_of", lambda kvc: geometry)

    def nbytes(mode="null", max_running=8, **options):
        kvc = SimpleNamespace(
            server_args=SimpleNamespace(
                max_running_requests=max_running, disaggregation_mode=mode, tp_size=2
            ),
            model_config=SimpleNamespace(num_attention_heads=16, context_len=64 * 100),
        )
        sizing = object.__new__(pool_sizing.KVSpecPoolConfigurator)
        sizing._kvc, sizing._config = kvc, KVSpecConfig(**options)
        return sizing._selection_bytes()

    # Masses and lists of 100 pages, scores of one layer, and 32 queries of 8 heads.
    lists, scores = 2 * 4 * 100 * 2 * 4, 100 * 2 * 4 * 4 * 4
    assert nbytes() == nbytes(draft_view="pages") == 8 * (lists + scores + 32 * 4 * 8 * 64 * 2)
    assert nbytes(max_running=16) == 2 * nbytes()
    assert nbytes("prefill") == nbytes(draft_view="all") == nbytes(draft_len=0) == 0
    # Lists, K and V in bf16 and K in fp32 of one layer, and attention of two blocks.
    of_layer = 64 * 100 * 2 * 64 * (2 + 2 + 4)
    scored = 8 * lists // 2 + of_layer + 2 * 2**26 * 4
    assert nbytes(compressor="snapkv") == scored
    # Without lists of their own, heads read those of SGLang's pages.
    assert nbytes(compressor="snapkv:heads=same") == of_layer + 2 * 2**26 * 4
    assert nbytes("prefill", compressor="snapkv") == 0


@pytest.fixture
def kvc_with_layers(monkeypatch):
    """Return a function that makes a configurator of a model with a linear layer [96, 256] and a
    vocabulary projection [128, 256]."""
    layer = SimpleNamespace(weight=torch.empty(96, 256))
    projection = SimpleNamespace(weight=torch.empty(128, 256))

    def copied_layers(model, *, is_checkpoint):
        return [layer] if is_checkpoint else [layer, projection]

    monkeypatch.setattr(pool_sizing, "copied_layers", copied_layers)

    def make(device="cuda", mode="null"):
        return SimpleNamespace(
            device=device,
            server_args=SimpleNamespace(
                max_running_requests=8, tp_size=1, nnodes=1, disaggregation_mode=mode
            ),
            model=None,
            model_config=SimpleNamespace(context_len=32768),
        )

    return make


def test_copies_of_weights_are_known(kvc_with_layers):
    def nbytes(device="cuda", mode="null", **options):
        kvc = kvc_with_layers(device, mode)
        return pool_sizing.draft_copy_bytes(kvc, KVSpecConfig(**options))

    # 4 codes in 2 bytes, scale and zero of 4 groups, and a counter for each 64 columns.
    layer, projection = 96 * (128 + 4 * 4) + 2 * 4, 128 * (128 + 4 * 4) + 2 * 4
    assert nbytes(draft_weights="int4") == layer + projection
    assert nbytes(draft_weights="/copy") == layer
    assert nbytes() == nbytes("cpu", draft_weights="int4") == 0
    assert nbytes(mode="prefill", draft_weights="int4") == 0


@pytest.mark.parametrize(
    ("extra", "draft_weights", "expected"),
    [
        (0, "int4", "--kvspec-draft-weights takes 0.00 GiB .*--mem-fraction-static"),
        (-1, "int4", "KV memory do not hold the recent window"),
        (0, "target", "KV memory do not hold the recent window"),
    ],
)
def test_copies_that_leave_no_kv_memory_are_named(
    plan_on_gpu, kvc_with_layers, monkeypatch, extra, draft_weights, expected
):
    """The memory of the copies would suffice exactly for one page, or not quite."""
    sizing = object.__new__(pool_sizing.KVSpecPoolConfigurator)
    sizing._kvc, sizing._config = kvc_with_layers(), KVSpecConfig(draft_weights=draft_weights)
    monkeypatch.setattr(sizing, "_outside_bytes", lambda: 0)
    copies = pool_sizing.draft_copy_bytes(sizing._kvc, KVSpecConfig(draft_weights="int4"))
    least = least_budget(sizing._config)
    with pytest.raises(ConfigError, match=expected):
        sizing.calculate_pool_sizes(least - copies + extra, 64)
    sizing.calculate_pool_sizes(least, 64)


def least_budget(config):
    """Return the memory of the recent window, the padding page and one page."""
    window_pages = window_pages_for(8, config.recent_pages, config.max_draft_len, 64)
    return window_pages * PAGE.plain + 2 * PAGE.anchor + PAGE.residual


def test_the_start_line_names_copies_of_weights(plan_on_gpu):
    plan, codec = plan_on_gpu(), SimpleNamespace(anchor_bits_per_element=4.5)
    line = pool_sizing.describe(plan, KVSpecConfig(), codec, 64, copies_bytes=3 * GIB // 2)
    assert "; beside it 4-bit weights 1.50 GiB; residual store" in line
    assert "weights" not in start_line(plan)


def test_without_a_store_all_residuals_are_cached(plan_on_gpu):
    for options in ({}, {"host_gb": 0}):
        plan = plan_on_gpu(**options)
        assert plan.host_pages == 0
        assert plan.cache_pages == plan.num_pages


def test_a_store_holds_more_pages_and_the_cache_the_longest_request(plan_on_gpu):
    plan = plan_on_gpu(host_gb=400, residual_hbm_fraction=0.01)
    assert plan.host_pages == plan.num_pages > 3 * plan_on_gpu().num_pages
    assert plan.cache_pages >= 512 + 2
    assert plan.hbm_bytes <= 40 * GIB


def test_the_store_limits_what_fits(plan_on_gpu):
    assert plan_on_gpu(host_gb=80).num_pages == 80 * GIB // PAGE.residual


@pytest.mark.parametrize("options", [{"host_gb": 4}, {"host_gb": 400, "max_pages": 1000}])
def test_a_store_without_benefit_is_not_made(plan_on_gpu, options):
    """The store is too small, or would hold pages that are all cached."""
    plan = plan_on_gpu(**options)
    assert plan.host_pages == 0
    assert plan.num_pages == plan_on_gpu(max_pages=options.get("max_pages")).num_pages


@pytest.mark.parametrize("host_gb", [0, 80])
def test_kept_anchors_come_out_of_the_kv_memory(plan_on_gpu, host_gb):
    tiers = {"host_gb": host_gb, "prefix_host_gb": 1}
    without = plan_on_gpu(**tiers)
    made = plan_on_gpu(**tiers, prefix_hbm_fraction=0.1)
    assert made.hbm_bytes <= 40 * GIB
    assert 0.09 * 40 * GIB < made.kept_anchor_pages * PAGE.anchor < 0.1 * 40 * GIB
    assert without.kept_anchor_pages == 0
    if host_gb:
        # The store still limits the pages, so the kept anchors shrink the cache.
        assert made.num_pages == without.num_pages
        assert made.cache_pages < without.cache_pages
    else:
        assert 0.89 * without.num_pages < made.num_pages < 0.91 * without.num_pages


def test_freed_anchors_make_room_for_more_pages(plan_on_gpu):
    options = {"host_gb": 400, "residual_hbm_fraction": 0.01}
    dense = plan_on_gpu(**options)
    scored = {"compressor": "snapkv:keep_anchors=false"}
    freed = plan_on_gpu(**options, **scored)
    # A tenth for what drafts read, a tenth for answers, and a request of 32,768 tokens.
    of_prompt = pages_of_one_request(32768, KVSpecConfig(host_gb=400).max_draft_len, 64)
    assert freed.anchor_pages == math.ceil(0.2 * freed.num_pages) + of_prompt
    assert freed.num_pages > 2 * dense.num_pages
    assert freed.hbm_bytes <= 40 * GIB
    wide = plan_on_gpu(**options, **scored, draft_budget=0.5)
    assert wide.anchor_pages == math.ceil(0.6 * wide.num_pages) + of_prompt
    assert dense.num_pages < wide.num_pages < freed.num_pages
    # Where residuals take the memory, too, more fits as well, if not much.
    assert dense.num_pages > plan_on_gpu(**scored).num_pages > plan_on_gpu().num_pages
    few = plan_on_gpu(**scored, max_pages=500)
    assert few.anchor_pages == few.num_pages == 500


def test_the_start_line_says_how_many_pages_have_anchors(plan_on_gpu):
    plan = plan_on_gpu(compressor="snapkv:keep_anchors=false")
    share = plan.anchor_pages / plan.num_pages
    held = plan.anchor_pages * PAGE.anchor / GIB
    assert f"anchors {held:.2f} of {share:.0%} of the pages at once + " in start_line(plan)
    assert "at once" not in start_line(plan_on_gpu())


def start_line(plan):
    codec = SimpleNamespace(anchor_bits_per_element=4.5)
    return pool_sizing.describe(plan, KVSpecConfig(), codec, page_size=64)


def test_the_start_line_compares_with_plain_kv_where_kv_memory_limits(plan_on_gpu):
    plan = plan_on_gpu(host_gb=400, residual_hbm_fraction=0.01)
    ratio = plan.num_pages / plan.plain_pages
    assert f"({ratio:.2f}x, limited by KV memory)" in start_line(plan)


def test_the_start_line_names_the_limit_that_the_user_set(plan_on_gpu):
    line = start_line(plan_on_gpu(max_pages=100))
    assert "6400 tokens fit, limited by --max-total-tokens; " in line
    assert "0." not in line.split(";")[0]


def test_the_start_line_names_a_window_that_takes_most_of_the_memory(plan_on_gpu):
    plan = plan_on_gpu(recent_pages=50, budget=5 * GIB, context_len=64)
    assert plan.num_pages < plan.plain_pages
    assert "the recent window takes 65% of the KV memory" in start_line(plan)
    assert "x, limited by" not in start_line(plan)


def test_the_start_line_names_host_memory_that_is_too_small(plan_on_gpu):
    plan = replace(plan_on_gpu(host_gb=80), num_pages=100, host_pages=100)
    assert "6400 tokens fit, limited by host memory for residuals" in start_line(plan)
