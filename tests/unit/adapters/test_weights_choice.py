"""--kvspec-draft-weights auto on a server, before its model is loaded."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters import weights_choice
from sglang_kvspec.adapters.weights_choice import with_weights
from sglang_kvspec.core.config import KVSpecConfig

CONFIG = Path(__file__).resolve().parents[3] / "examples/models/llama-3.1-8b.json"
FIELDS = {"page_size": 64, "max_running_requests": 48}
AUTO = KVSpecConfig(draft_weights="auto")


def model_of(dtype: torch.dtype = torch.bfloat16, **changes: object) -> SimpleNamespace:
    fields = json.loads(CONFIG.read_text(encoding="utf-8")) | changes
    text = SimpleNamespace(to_dict=lambda: fields)
    return SimpleNamespace(hf_text_config=text, dtype=dtype, context_len=40960)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")


@pytest.fixture
def chosen(caplog: pytest.LogCaptureFixture):
    def choose(model: SimpleNamespace, *, on_gpu: bool = True, fields=FIELDS) -> tuple[str, str]:
        with caplog.at_level(logging.INFO):
            config = with_weights(AUTO, fields, model, on_gpu=on_gpu)
        return config.draft_weights, caplog.text

    return choose


@pytest.mark.parametrize("weights", ["target", "int4"])
def test_what_was_asked_for_stays(weights, caplog):
    config = KVSpecConfig(draft_weights=weights)
    assert with_weights(config, {}, None, on_gpu=True) is config
    assert not caplog.text


def test_a_model_of_8b_gets_copies(chosen):
    weights, log = chosen(model_of())
    assert weights == "int4"
    assert "draft weights: int4, because copies promise 1.5" in log


def test_ranks_and_memory_are_those_of_the_server(monkeypatch, chosen):
    seen = []
    choose = weights_choice.choose_weights
    monkeypatch.setattr(
        weights_choice, "choose_weights", lambda made: seen.append(made) or choose(made)
    )
    chosen(model_of(), fields=FIELDS | {"tp_size": 2, "mem_fraction_static": 0.7})
    (made,) = seen
    assert (made.tp, made.memory_share, made.max_requests) == (2, 0.7, 48)
    assert made.model.max_context == 40960
    assert made.host_bytes == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float16}, "the model is not in bf16"),
        ({"hidden_size": None}, "there is no forecast: the model's config has no hidden_size"),
    ],
)
def test_a_model_without_a_forecast_uses_its_own_weights(chosen, changes, reason):
    weights, log = chosen(model_of(**changes))
    assert weights == "target"
    assert reason in log


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kernels": "triton"}, "there are no figures for Triton kernels"),
        ({"codec": "turboquant"}, "there are no figures for turboquant on a GPU"),
        (
            {
                "exact_residual": "packed",
                "host_gb": 1,
                "compressor": "snapkv:keep_anchors=false",
                "draft_budget": 0.1,
            },
            "there are no figures for packed residuals with freed anchors",
        ),
    ],
)
def test_what_has_no_figures_uses_the_models_own_weights(caplog, changes, reason):
    with caplog.at_level(logging.INFO):
        config = with_weights(replace(AUTO, **changes), FIELDS, model_of(), on_gpu=True)
    assert config.draft_weights == "target"
    assert reason in caplog.text


def test_an_unknown_gpu_and_a_cpu_use_the_models_own_weights(monkeypatch, chosen):
    weights, log = chosen(model_of(), on_gpu=False)
    assert weights == "target"
    assert "on a CPU copies make drafts slower" in log
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
    weights, log = chosen(model_of())
    assert weights == "target"
    assert "there are no figures for NVIDIA H100 PCIe" in log
