"""--kvspec-exact-residual auto on a server, before its model is loaded."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters.residual_choice import with_residual_form
from sglang_kvspec.core.config import KVSpecConfig

CONFIG = Path(__file__).resolve().parents[3] / "examples/models/llama-3.1-8b.json"
FIELDS = {"page_size": 64, "max_running_requests": 64}
AUTO = KVSpecConfig(exact_residual="auto", host_gb=50)


def model_of(**changes: object) -> SimpleNamespace:
    fields = json.loads(CONFIG.read_text(encoding="utf-8")) | changes
    text = SimpleNamespace(to_dict=lambda: fields)
    return SimpleNamespace(hf_text_config=text, dtype=torch.bfloat16, context_len=40960)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


@pytest.fixture
def chosen(caplog: pytest.LogCaptureFixture):
    def choose(config=AUTO, model=None, *, on_gpu: bool = True, **fields) -> tuple[str, str]:
        with caplog.at_level(logging.INFO):
            made = with_residual_form(config, FIELDS | fields, model or model_of(), on_gpu=on_gpu)
        return made.exact_residual, caplog.text

    return choose


@pytest.mark.parametrize("form", ["raw", "packed"])
def test_what_was_asked_for_stays(form, caplog):
    config = KVSpecConfig(exact_residual=form, host_gb=1)
    assert with_residual_form(config, {}, None, on_gpu=True) is config
    assert not caplog.text


def test_a_server_of_8b_with_little_host_memory_packs(chosen):
    form, log = chosen()
    assert form == "packed"
    assert "exact residuals: packed, because packed residuals promise 1." in log


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host_gb": 0}, "there is no host memory for residuals"),
        ({"host_gb": None}, "there is no host memory for residuals"),
        ({"host_gb": 400}, "packed residuals promise"),
        ({"target": "int8"}, "packing needs uniform4 anchors of 4 bits"),
        ({"anchor_bits": 2}, "packing needs uniform4 anchors of 4 bits"),
        ({"compressor": "snapkv:keep_anchors=false"}, "no forecast knows packed residuals beside"),
        ({"prefix_host_gb": 1}, "prefix tiers and transfers share pages of one form"),
        ({"kernels": "triton"}, "there are no figures for Triton kernels"),
        ({"codec": "turboquant"}, "packing needs uniform4 anchors of 4 bits"),
    ],
)
def test_other_servers_keep_residuals_raw(chosen, changes, reason):
    form, log = chosen(replace(AUTO, **changes))
    assert form == "raw"
    assert f"exact residuals: raw, because {reason}" in log


@pytest.mark.parametrize("transfer", ["split", "full"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_servers_of_a_pair_keep_residuals_raw(chosen, role, transfer):
    form, log = chosen(replace(AUTO, transfer=transfer), disaggregation_mode=role)
    assert form == "raw"
    assert "transfers share pages of one form" in log


def test_the_dtype_is_the_one_that_is_served(chosen, caplog):
    gains = {}
    for saved in ("bfloat16", "float16", "float32"):
        for served in (torch.bfloat16, torch.float16):
            model = model_of(dtype=saved, torch_dtype=saved)
            model.dtype = served
            caplog.clear()
            form, log = chosen(replace(AUTO, draft_weights="auto"), model)
            gains.setdefault(served, set()).add((form, log.partition("because ")[2]))
    # A value takes fewer bits in bf16 than in fp16.
    (half,), (brain,) = gains[torch.float16], gains[torch.bfloat16]
    assert half != brain


def test_without_a_forecast_residuals_are_raw(chosen, monkeypatch):
    form, log = chosen(on_gpu=False)
    assert form == "raw"
    assert "a CPU takes longer to pack than fewer bytes save" in log
    form, log = chosen(model=model_of(hidden_size=None))
    assert form == "raw"
    assert "there is no forecast: the model's config has no hidden_size" in log
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
    form, log = chosen()
    assert form == "raw"
    assert "there are no figures for NVIDIA H100 PCIe" in log


def test_a_form_must_be_decided_before_it_is_used():
    with pytest.raises(AssertionError, match="not decided"):
        _ = AUTO.packs_residuals
