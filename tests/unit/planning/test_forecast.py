"""Forecasts of whole deployments, and their constants compared with recorded measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.costs import AcceptanceCurve
from sglang_kvspec.planning.devices import (
    CUDA_SHARES,
    READ_SHARE,
    TRITON_SHARES,
    find_device,
)
from sglang_kvspec.planning.draft_budget import ALL_PAGES, BUDGETS, kept_drafts
from sglang_kvspec.planning.draft_weights import INT4_KEPT, int4_time
from sglang_kvspec.planning.forecast import (
    MEASURED_ACCEPTANCE,
    Deployment,
    forecast,
    read_acceptance,
    sweep_contexts,
)
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.record_bytes import page_bytes_of

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
H200 = find_device("h200")
LLAMA_8B = ModelShape.from_config(
    json.loads((ROOT / "examples/models/llama-3.1-8b.json").read_text(encoding="utf-8"))
)
QWEN3_32B = ModelShape.from_config(
    {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
)
# The measured case: 32 query heads, 8 KV heads, 16 requests of 32768 tokens.
LAYER = replace(LLAMA_8B, num_layers=1)
MEASURED_TOKENS = 16 * 32768


def deployment(**changes):
    curve = MEASURED_ACCEPTANCE["uniform4"]
    fields = {"model": LLAMA_8B, "device": H200, "curve": curve, **changes}
    return Deployment(**fields)


def microseconds_of(name):
    figures = json.loads((RESULTS / name).read_text())["figures"]
    return {figure["name"]: figure["value"] for figure in figures}


@pytest.fixture(scope="module")
def microseconds():
    return microseconds_of("attention_h200.json")


@pytest.mark.parametrize("codec", ["log4", "uniform4"])
@pytest.mark.parametrize(
    ("shares", "result"),
    [(CUDA_SHARES, "attention_h200.json"), (TRITON_SHARES, "attention_triton.json")],
    ids=["cuda", "triton"],
)
def test_shares_are_those_measured(shares, result, codec):
    """The tolerance is 15 %. A kernel that becomes faster by more needs new constants."""
    microseconds = microseconds_of(result)
    page = page_bytes_of(LAYER, codec, "int8", 64)
    share = shares[codec, "int8"]

    def of_bandwidth(page_bytes, name):
        seconds = microseconds[name] * 1e-6
        return page_bytes / 64 * MEASURED_TOKENS / seconds / H200.hbm_bytes_per_s

    def of_flops(num_tokens, name):
        flops = 4 * 32 * 128 * num_tokens * MEASURED_TOKENS
        return flops / (microseconds[name] * 1e-6) / H200.flops

    plain = of_bandwidth(page.plain, "attn.draft.16x32768.flashinfer_bf16.us")
    draft = of_bandwidth(page.anchor, f"attn.draft.16x32768.{codec}.us")
    verify = of_bandwidth(page.anchor + page.residual, f"attn.verify1.16x32768.{codec}.us")
    exact = of_bandwidth(page.plain, "attn.verify1.16x32768.flashinfer_bf16_fa2.us")
    assert plain == pytest.approx(READ_SHARE, rel=0.15)
    assert draft == pytest.approx(share.draft, rel=0.15)
    assert verify == pytest.approx(share.verify, rel=0.15)
    assert exact == pytest.approx(shares[codec, "exact"].verify, rel=0.15)
    assert of_flops(64, f"attn.verify64.16x32768.{codec}.us") == pytest.approx(
        share.verify_flops, rel=0.15
    )
    assert of_flops(64, "attn.verify64.16x32768.flashinfer_bf16_fa2.us") == pytest.approx(
        shares[codec, "exact"].verify_flops, rel=0.15
    )


@pytest.mark.parametrize(("num_requests", "measured_ms"), [(1, 5.43), (8, 12.41), (16, 19.92)])
def test_plain_decode_steps_are_those_measured(num_requests, measured_ms):
    """Measured with an 8B shape on one H200 at 32768 tokens, plain SGLang with FlashInfer in
    BF16."""
    seconds = deployment().costs().plain_seconds(num_requests, num_requests * 32768)
    assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.03)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("codec", ["log4", "uniform4"])
def test_verifications_take_what_was_measured(microseconds, codec, tokens):
    """At 4 tokens uniform4 takes a tenth less than the model, and at 16 tokens log4 a tenth
    more."""
    costs = deployment(codec=codec, target="int8", model=LAYER).costs()
    seconds = costs.verify_attention_seconds(16, 16 * tokens, MEASURED_TOKENS)
    measured = microseconds[f"attn.verify{tokens}.16x32768.{codec}.us"]
    assert seconds * 1e6 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("codec", ["log4", "uniform4"])
def test_the_default_curve_is_the_recorded_one(codec):
    recorded = read_acceptance(json.loads((RESULTS / "acceptance.json").read_text()), codec)
    ours = MEASURED_ACCEPTANCE[codec]
    assert ours.draft_lens == recorded.draft_lens
    assert ours.accepted == pytest.approx(recorded.accepted, rel=0.02)


def test_requests_that_fit_8b_at_32k():
    row = forecast(deployment(), 32768)
    setting = row.fetched.setting
    # (0.88 * 141 GB - 16.06 GB) / 4.295 GB.
    assert setting.plain_requests == 25
    # An anchor has 146.25 of 512 bytes per token, head and layer. Three pages of window are added.
    always = 32768 * 35840 + 3 * 64 * 131072
    assert setting.request.always == always
    assert setting.resident_requests == int(108.02e9 / (always + 32768 * 131072))
    assert setting.most_requests == int((108.02e9 - 32768 * 131072) / always)


def test_8_bit_residuals_in_host_memory_bring_more_than_twice_on_32b():
    row = forecast(deployment(model=QWEN3_32B, target="int8", draft_budget=ALL_PAGES), 32768)
    assert 2.2 < row.fetched.speed_up < 2.8
    assert row.fetched.cycle.num_fetching > 0


def test_draft_steps_take_what_was_measured():
    """9.4 ms over all anchors, and 5.9 ms over a tenth of the pages: 16 requests of 32768 tokens,
    8B shape, on one H200."""
    for budget, measured_ms in ((ALL_PAGES, 9.4), (0.1, 5.9)):
        seconds = deployment().setting(32768, budget).costs.seconds(16, 16 * 32768, 0, 0, 0)
        assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.07)


@pytest.mark.parametrize("budget", [0.05, 0.1])
def test_drafts_are_lost_as_measured(budget):
    """The measured request lengths are far from geometric, so the tolerance is 1 %."""
    found = json.loads((RESULTS / "views_eval31m_16k.json").read_text())["figures"]
    figures = {figure["name"]: figure["value"] for figure in found}
    # The chance of a draft that gives the measured mean of 16 over all anchors.
    curve = AcceptanceCurve.geometric(0.99575, 16)
    assert curve.expected_accepted(16) == pytest.approx(figures["views.all.mean_of_16"], rel=0.001)
    kept = curve.thinned(kept_drafts(budget)).expected_accepted(16)
    assert kept == pytest.approx(figures[f"views.pages.{budget}.4.mean_of_16"], rel=0.01)


def test_long_contexts_read_a_share_of_the_pages():
    row = forecast(deployment(), 32768)
    every = forecast(deployment(draft_budget=ALL_PAGES), 32768)
    for ours, theirs in ((row.resident, every.resident), (row.fetched, every.fetched)):
        assert ours.setting.pages_read < 0.2
        assert theirs.setting.pages_read == ALL_PAGES
        assert ours.tokens_per_s > 1.2 * theirs.tokens_per_s


def test_products_with_copies_take_what_was_measured():
    found = json.loads((RESULTS / "int4_products.json").read_text())["figures"]
    figures = {figure["name"]: figure["value"] for figure in found}
    for num_rows in (1, 4, 8, 16, 32, 48, 64):
        times_as_fast = figures[f"w4.products.m{num_rows}"]
        assert int4_time(num_rows) == pytest.approx(1 / times_as_fast, rel=0.01)
    assert int4_time(65) == 1


def test_copies_lose_as_many_drafts_as_measured():
    found = json.loads((RESULTS / "draft_weights_vocabulary_eval31m_2k.json").read_text())
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    # The chance of a draft that gives the measured mean of 16 with the model's own weights.
    curve = AcceptanceCurve.geometric(0.9927, 16)
    mean = figures["w4.accept.target.mean"]
    assert curve.expected_accepted(16) == pytest.approx(mean, rel=0.001)
    kept = curve.thinned(INT4_KEPT).expected_accepted(16)
    assert kept == pytest.approx(figures["w4.accept.own_text.projection_nearest.mean"], rel=0.001)


def test_copies_speed_up_one_request_and_take_memory_of_kv():
    own, copies = (
        forecast(deployment(draft_weights=weights, max_requests=1), 4096).resident
        for weights in ("target", "int4")
    )
    assert copies.tokens_per_s > 1.2 * own.tokens_per_s
    # 32 layers of the weights of bench_int4_products.py, and the vocabulary projection.
    num_weights = 32 * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336) + 128256 * 4096
    assert copies.setting.copies_bytes == num_weights * 4.5 / 8
    # Plain SGLang has no copies.
    assert copies.setting.plain_requests == own.setting.plain_requests
    full = [deployment(draft_weights=w, max_requests=10**6) for w in ("target", "int4")]
    own, copies = (forecast(each, 4096).resident.setting for each in full)
    lost = own.resident_requests - copies.resident_requests
    size = copies.request.always + copies.request.residual
    assert lost == pytest.approx(copies.copies_bytes / size, abs=1)


def test_auto_takes_the_better_weights():
    for model in (LLAMA_8B, QWEN3_32B):
        for max_requests in (1, 256):
            auto, *each = (
                forecast(
                    deployment(model=model, draft_weights=weights, max_requests=max_requests), 8192
                ).fetched.tokens_per_s
                for weights in ("auto", "target", "int4")
            )
            assert auto == max(each)


def test_a_quantised_model_has_no_copies():
    small = replace(LLAMA_8B, weight_bytes_per_param=1.0)
    assert deployment(model=small, draft_weights="auto").weights_to_try == ("target",)
    with pytest.raises(ConfigError, match=r"--draft-weights int4 needs a model in bfloat16"):
        deployment(model=small, draft_weights="int4")


def test_copies_must_leave_room_for_kv():
    with pytest.raises(ConfigError, match=r"--draft-weights int4 takes 18\.\d GB a GPU, and the"):
        deployment(model=QWEN3_32B, draft_weights="int4", memory_share=0.55)


def test_drafts_that_are_seldom_right_read_what_is_best():
    """Reading a share costs acceptance, so the plan weighs it."""
    config = deployment(curve=AcceptanceCurve.geometric(0.5))
    row = forecast(config, 4096)
    fixed = [
        forecast(replace(config, draft_budget=budget), 4096).resident.tokens_per_s
        for budget in BUDGETS
    ]
    assert row.resident.tokens_per_s == pytest.approx(max(fixed))


@settings(max_examples=25, deadline=None)
@given(
    context_len=st.integers(1, 300_000),
    longer=st.integers(0, 300_000),
    target=st.sampled_from(["exact", "int8"]),
)
def test_longer_contexts_never_let_more_requests_in(context_len, longer, target):
    config = deployment(target=target)
    short, long = config.setting(context_len), config.setting(context_len + longer)
    assert long.plain_requests <= short.plain_requests
    assert long.resident_requests <= short.resident_requests
    assert long.most_requests <= short.most_requests


@settings(max_examples=15, deadline=None)
@given(
    context_len=st.integers(512, 600_000),
    gpu=st.sampled_from(["H100", "H200", "GH200", "B200"]),
    target=st.sampled_from(["exact", "int8"]),
    probability=st.floats(0, 1),
    gbps=st.floats(1, 400),
)
def test_no_deployment_is_planned_below_plain(context_len, gpu, target, probability, gbps):
    config = deployment(
        model=replace(LLAMA_8B, max_context=600_000),
        device=find_device(gpu).with_link(gbps * 1e9),
        target=target,
        curve=AcceptanceCurve.geometric(probability, 16),
        max_requests=32,
    )
    row = forecast(config, context_len)
    assert row.resident.speed_up >= 1.0
    assert row.fetched.speed_up >= 1.0
    assert row.fetched.tokens_per_s >= row.resident.tokens_per_s * (1 - 1e-9)


def test_ranks_fit_more_together():
    one, four = (forecast(deployment(model=QWEN3_32B, tp=tp), 32768) for tp in (1, 4))
    # All ranks together hold the weights once, so four GPUs have more than four times the room.
    assert four.fetched.setting.plain_requests > 4 * one.fetched.setting.plain_requests


def test_host_memory_limits_requests():
    residual = 32768 * 131072
    row = forecast(deployment(host_bytes=5.5 * residual), 32768)
    assert row.fetched.setting.most_requests == 5
    assert row.fetched.cycle is None or row.fetched.cycle.num_requests <= 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": QWEN3_32B, "device": find_device("L40S")}, "leave no room for KV"),
        ({"max_requests": 0}, "--max-running-requests"),
        ({"host_bytes": -1.0}, "--host-memory-gb"),
        ({"memory_share": 0.0}, "--mem-fraction-static"),
        ({"tp": 3}, "--tp"),
    ],
)
def test_bad_deployments_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        deployment(**change)


def test_bad_contexts_gpus_and_links_are_refused():
    with pytest.raises(ConfigError, match="--context"):
        forecast(deployment(), 0)
    with pytest.raises(ConfigError, match="--context must be at most 131072"):
        forecast(deployment(), 131073)
    with pytest.raises(ConfigError, match=r"--gpu must be one of .*H200"):
        find_device("TPU")
    with pytest.raises(ConfigError, match="--link-gbps"):
        H200.with_link(0.0)


def test_a_sweep_goes_as_far_as_the_model():
    assert sweep_contexts(5000, 16384) == [4096, 5000, 8192, 16384]
    assert sweep_contexts(4096, 10**7)[-1] == 524288


@pytest.mark.parametrize("results", [{}, {"figures": [{"name": "accept.log4.bits", "value": 1}]}])
def test_a_file_without_the_codecs_curve_is_refused(results):
    with pytest.raises(ConfigError, match=r"accept\.log4\.mean_of_"):
        read_acceptance(results, "log4")


@pytest.mark.parametrize("figures", [3, [3], [{"name": "accept.log4.mean_of_1", "value": "x"}]])
def test_a_file_of_another_kind_is_refused(figures):
    with pytest.raises(ConfigError, match="list `figures`"):
        read_acceptance({"figures": figures}, "log4")
