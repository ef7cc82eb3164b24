"""Flags and models of a GPU server, checked without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from harness.models import DEMO_MODEL

from kvspec_kernels.ops import device
from kvspec_testkit.models.gptq_copy import write_gptq
from sglang_kvspec.adapters import activation
from sglang_kvspec.adapters.model_check import check_model, model_config_of
from sglang_kvspec.adapters.server_args import (
    _implied,
    build_server_args,
    check_cpu_flags,
    check_flags,
    check_gpu_flags,
)
from sglang_kvspec.core.config import ExactResidual, Kernels, KVSpecConfig, Target, Transfer
from sglang_kvspec.core.errors import ConfigError, UnsupportedError
from sglang_kvspec.core.sglang_releases import UNTESTED_NAME

DETERMINISTIC = {"enable_deterministic_inference": True}
PREFILL = {
    "disaggregation_mode": "prefill",
    "disaggregation_transfer_backend": "kvspec",
}


@pytest.mark.parametrize("head_dim", [80, 96, 112])
def test_the_int8_target_takes_more_head_sizes(tmp_path: Path, head_dim: int) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": head_dim}))
    model = model_config_of({"model_path": str(tmp_path), "dtype": "bfloat16"})
    check_model(KVSpecConfig(target="int8"), model, 64, on_gpu=True)
    with pytest.raises(UnsupportedError, match=rf"head size {head_dim} .*64, 128, 256"):
        check_model(KVSpecConfig(), model, 64, on_gpu=True)


def show_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Make GPUs of these compute capabilities visible."""

    def properties(index: int) -> SimpleNamespace:
        major, minor = capabilities[index]
        return SimpleNamespace(name="GPU X", major=major, minor=minor, total_memory=80 << 30)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(capabilities))
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    by_device = {torch.device("cuda", i): found for i, found in enumerate(capabilities)}
    monkeypatch.setattr(device, "capability", by_device.__getitem__)


def test_prefix_cache_of_a_gpu_without_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "cpu_platform_is_active", lambda: False)
    check_flags(KVSpecConfig(), {"radix_cache_backend": "kvspec"})
    with pytest.raises(ConfigError, match=r"--radix-cache-backend mine .*allowed: kvspec"):
        check_flags(KVSpecConfig(), {"radix_cache_backend": "mine"})


@pytest.mark.parametrize(
    ("changes", "dtype", "expected"),
    [
        ({"head_dim": 80}, "bfloat16", "head size 80 .*64, 128, 256"),
        ({}, "float32", "dtype float32 .*bfloat16"),
        (
            {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 64},
            "bfloat16",
            "query heads per KV head 32 .*1 to 16",
        ),
    ],
)
def test_models_no_kernel_covers(
    tmp_path: Path, changes: dict[str, Any], dtype: str, expected: str
) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    model = model_config_of({"model_path": str(tmp_path), "dtype": dtype})
    with pytest.raises(UnsupportedError, match=f"on a GPU: {expected}"):
        check_model(KVSpecConfig(), model, 64, on_gpu=True)
    good = model_config_of({"model_path": str(DEMO_MODEL), "dtype": "bfloat16"})
    check_model(KVSpecConfig(), good, 64, on_gpu=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rotated_anchors_serve_on_a_gpu_with_heads_that_fit(
    tmp_path: Path, head_dim: int, bits: int
) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | {"head_dim": head_dim}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = model_config_of({"model_path": str(tmp_path), "dtype": "bfloat16"})
    asked = KVSpecConfig(codec="turboquant", anchor_bits=bits)
    check_model(asked, model, 64)
    if head_dim <= 128:
        check_model(asked, model, 64, on_gpu=True)
        return
    with pytest.raises(
        UnsupportedError,
        match=r"--kvspec-codec turboquant .* on a GPU: head size 256 \(allowed: up to 128\)",
    ):
        check_model(asked, model, 64, on_gpu=True)


def test_packed_residuals_need_values_of_two_bytes() -> None:
    config = KVSpecConfig(exact_residual="packed", host_gb=1)
    single, half = (
        model_config_of({"model_path": str(DEMO_MODEL), "dtype": dtype})
        for dtype in ("float32", "bfloat16")
    )
    for on_gpu in (False, True):
        check_model(config, half, 64, on_gpu=on_gpu)
    with pytest.raises(ConfigError, match=r"exact-residual packed: .*bf16 or fp16, got .*float32"):
        check_model(config, single, 64)


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"host_gb": 1}, {}),
        ({"host_gb": 1}, {"disaggregation_mode": "decode"}),
        ({"transfer": "full", "host_gb": 1}, {"disaggregation_mode": "decode"}),
        ({"prefix_host_gb": 1}, {}),
        ({"prefix_dir": "x"}, {}),
    ],
)
def test_a_gpu_packs_residuals_wherever_they_are_outside_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    show_gpus(monkeypatch, (9, 0))
    monkeypatch.delenv(UNTESTED_NAME, raising=False)
    for form in get_args(ExactResidual):
        check_gpu_flags(KVSpecConfig(exact_residual=form, **options), arguments)


FREED = {"compressor": "snapkv:keep_anchors=false", "draft_budget": 0.1, "host_gb": 1}


@pytest.mark.parametrize(
    ("options", "flag", "allowed"),
    [
        ({"codec": "turboquant"}, "--kvspec-codec turboquant", "log4, uniform4"),
        (
            {"exact_residual": "packed", **FREED},
            "--kvspec-exact-residual packed with keep_anchors=false",
            "raw",
        ),
        (
            {"exact_residual": "packed", "prefix_server": "tcp://127.0.0.1:5"},
            "--kvspec-exact-residual packed with --kvspec-prefix-server",
            "raw",
        ),
    ],
)
def test_what_no_gpu_server_has_run_is_tried_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    flag: str,
    allowed: str,
) -> None:
    show_gpus(monkeypatch, (9, 0))
    monkeypatch.delenv(UNTESTED_NAME, raising=False)
    config = KVSpecConfig(**options)
    with pytest.raises(UnsupportedError) as caught:
        check_gpu_flags(config, {})
    assert str(caught.value) == (
        f"no GPU server has run {flag} (allowed on a GPU: {allowed}): use that, or set "
        "SGLANG_KVSPEC_UNTESTED=1 to try this one"
    )
    for form in ("raw", "auto"):
        check_gpu_flags(replace(config, codec="uniform4", exact_residual=form), {})
    monkeypatch.setenv(UNTESTED_NAME, "1")
    check_gpu_flags(config, {})
    assert f"no GPU server has run {flag}" in caplog.text


def test_cuda_kernels_are_asked_for_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *device: (9, 0))
    demo = model_config_of({"model_path": str(DEMO_MODEL), "dtype": "bfloat16"})
    config = KVSpecConfig(kernels="cuda")
    check_model(config, demo, 64, on_gpu=True)
    sparse = KVSpecConfig(kernels="cuda", anchor_bits=2)
    with pytest.raises(UnsupportedError, match=r"cuda .*covers its encoding \(allowed: auto, tri"):
        check_model(sparse, demo, 64, on_gpu=True)
    check_model(KVSpecConfig(kernels="triton", anchor_bits=2), demo, 64, on_gpu=True)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_gpus_other_than_hopper_are_served_in_triton(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    show_gpus(monkeypatch, capability, (9, 0))
    for kernels in ("auto", "triton"):
        for flags in ({}, DETERMINISTIC):
            check_gpu_flags(KVSpecConfig(kernels=kernels), flags)


@pytest.mark.parametrize("capabilities", [((9, 0), (8, 6)), ((9, 0),)])
def test_deterministic_sizes_fit_every_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capabilities: tuple[tuple[int, int], ...]
) -> None:
    show_gpus(monkeypatch, *capabilities)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 256}))
    wide = model_config_of({"model_path": str(tmp_path), "dtype": "bfloat16"})
    check_model(KVSpecConfig(), wide, 64, on_gpu=True, deterministic=True)
    check_model(KVSpecConfig(), wide, 128, on_gpu=True)
    with pytest.raises(UnsupportedError, match=r"--page-size 128 .*heads of 256 .*shared memory"):
        check_model(KVSpecConfig(), wide, 128, on_gpu=True, deterministic=True)


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
def test_a_cpu_has_no_kernels_to_choose(kernels: Kernels) -> None:
    with pytest.raises(UnsupportedError, match=f"--kvspec-kernels {kernels} needs a GPU .*unset"):
        check_cpu_flags(KVSpecConfig(kernels=kernels), {})


def test_packed_residuals_in_memory_need_a_gpu() -> None:
    config = KVSpecConfig(exact_residual="packed", host_gb=1)
    with pytest.raises(UnsupportedError, match=r"no effect on residuals in the memory of a CPU"):
        check_cpu_flags(config, {})
    check_cpu_flags(config, {"disaggregation_mode": "decode"})
    check_cpu_flags(KVSpecConfig(exact_residual="packed", host_gb=1, prefix_host_gb=1), {})


def test_weights_of_four_bits_need_bf16_on_a_gpu() -> None:
    config = KVSpecConfig(draft_weights="int4")
    half, good = (
        model_config_of({"model_path": str(DEMO_MODEL), "dtype": dtype})
        for dtype in ("float16", "bfloat16")
    )
    with pytest.raises(UnsupportedError, match=r"int4 .*dtype torch.float16 .*--dtype bfloat16"):
        check_model(config, half, 64, on_gpu=True)
    check_model(KVSpecConfig(), half, 64, on_gpu=True)
    check_model(config, half, 64)
    check_model(config, good, 64, on_gpu=True)


def test_a_checkpoint_for_drafts_is_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    demo = model_config_of({"model_path": str(DEMO_MODEL), "dtype": "bfloat16"})
    config = KVSpecConfig(draft_weights=str(tmp_path / "copy"))
    with pytest.raises(ConfigError, match=r"copy: config\.json cannot be read"):
        check_model(config, demo, 64)
    write_gptq(DEMO_MODEL, tmp_path / "copy")
    check_model(config, demo, 64, on_gpu=True)
    with pytest.raises(UnsupportedError, match="copy cannot be shared out to 2 ranks"):
        check_model(config, demo, 64, num_ranks=2)


def test_heads_are_split_evenly(tmp_path: Path) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    heads = {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | heads))
    wide = model_config_of({"model_path": str(tmp_path), "dtype": "bfloat16"})
    # Ranks of a GPU server may share a KV head; each has half of the query heads that attend to it.
    check_model(KVSpecConfig(), wide, 64, on_gpu=True, num_ranks=2)
    with pytest.raises(ConfigError, match=r"--tp-size 2 .*32 heads and 1 KV heads"):
        check_model(KVSpecConfig(), wide, 64, num_ranks=2)
    demo = model_config_of({"model_path": str(DEMO_MODEL), "dtype": "bfloat16"})
    for on_gpu, num_ranks in ((False, 2), (True, 2), (True, 4)):
        check_model(KVSpecConfig(), demo, 64, on_gpu=on_gpu, num_ranks=num_ranks)
    with pytest.raises(ConfigError, match=r"--tp-size 8 .*or multiples of the KV heads"):
        check_model(KVSpecConfig(), demo, 64, on_gpu=True, num_ranks=8)


@pytest.mark.parametrize(
    ("config", "flags", "capability", "expected"),
    [
        (
            {"host_gb": 4},
            {"prefill_max_requests": 2},
            (9, 0),
            "--prefill-max-requests 2 .*--kvspec-host-gb",
        ),
        ({"target": "int8"}, {"page_size": 128}, (9, 0), "--page-size 128"),
        (
            {"target": "int8", "target_attention": "int8"},
            DETERMINISTIC,
            (9, 0),
            "--kvspec-target-attention int8 .*allowed: int8_deterministic",
        ),
        ({}, {"page_size": 96} | DETERMINISTIC, (9, 0), "--page-size 96 .*powers of two"),
        (
            {"arithmetic": "deterministic"},
            {"page_size": 96} | DETERMINISTIC,
            (9, 0),
            "--page-size 96 .*--kvspec-arithmetic deterministic .*powers of two",
        ),
        (
            {"target_attention": "deterministic"},
            {"page_size": 96},
            (9, 0),
            "--page-size 96 .*--kvspec-target-attention deterministic .*powers of two",
        ),
        (
            {"target_attention": "int8"},
            {},
            (9, 0),
            r"--kvspec-target-attention int8 .*--kvspec-target exact \(allowed: int8\)",
        ),
        ({}, {}, (7, 5), r"capability 8\.0 and later .*GPU 1, GPU X, has 7\.5: hide it"),
        ({"kernels": "cuda"}, {}, (8, 6), r"cuda .*GPU 1, GPU X, has 8\.6 \(allowed: auto, triton"),
        ({"kernels": "cuda"}, {}, (12, 0), r"cuda .*GPU 1, GPU X, has 12\.0 \(allowed: auto"),
    ],
)
def test_what_a_gpu_cannot_serve_yet(
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    flags: dict[str, Any],
    capability: tuple[int, int],
    expected: str,
) -> None:
    show_gpus(monkeypatch, (9, 0), capability)
    with pytest.raises(UnsupportedError, match=expected):
        check_gpu_flags(KVSpecConfig(**config), flags)
    show_gpus(monkeypatch, (9, 0), (9, 0))
    check_gpu_flags(KVSpecConfig(kernels="cuda"), {})
    check_gpu_flags(KVSpecConfig(), {"page_size": 64, "prefill_max_requests": 2})
    check_gpu_flags(KVSpecConfig(host_gb=4), {"prefill_max_requests": 1})
    for target in get_args(Target):
        check_gpu_flags(KVSpecConfig(target=target), DETERMINISTIC)
    check_gpu_flags(KVSpecConfig(), PREFILL | DETERMINISTIC)
    check_gpu_flags(KVSpecConfig(draft_weights="int4"), DETERMINISTIC)
    check_gpu_flags(KVSpecConfig(target_attention="deterministic"), {})
    for mode in get_args(Transfer):
        check_gpu_flags(KVSpecConfig(transfer=mode), PREFILL)
    check_gpu_flags(KVSpecConfig(prefix_server="tcp://127.0.0.1:5", prefix_host_gb=1), {})


@pytest.mark.parametrize("arithmetic", ["fast", "deterministic", None])
def test_arithmetic_of_a_gpu_server(
    monkeypatch: pytest.MonkeyPatch, arithmetic: str | None
) -> None:
    monkeypatch.setattr(activation, "cpu_platform_is_active", lambda: False)
    show_gpus(monkeypatch, (9, 0))
    monkeypatch.setattr(activation, "switch_on", lambda config: None)
    # Releases that no GPU has run refuse one.
    monkeypatch.setenv(UNTESTED_NAME, "1")
    arguments = {"model_path": str(DEMO_MODEL), "dtype": "bfloat16", "kvspec": True}
    if arithmetic is not None:
        arguments["kvspec_arithmetic"] = arithmetic
    made = build_server_args(lambda **fields: SimpleNamespace(**fields), arguments)
    is_on = getattr(made, "enable_deterministic_inference", False)
    assert is_on == (arithmetic == "deterministic")


def test_prefix_cache_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    without, with_tiers = KVSpecConfig(), KVSpecConfig(prefix_host_gb=1, host_gb=1)
    for on_cpu, expected in ((True, ("kvspec", "kvspec")), (False, (None, "kvspec"))):
        monkeypatch.setattr(activation, "cpu_platform_is_active", lambda is_so=on_cpu: is_so)
        fields = [_implied(config, {}) for config in (without, with_tiers)]
        assert tuple(field["radix_cache_backend"] for field in fields) == expected
