"""Checkpoints in GPTQ and AWQ format as weights of drafts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from kvspec_kernels.reference.int4_weights import decode
from kvspec_testkit.models.gptq_copy import write_gptq
from kvspec_testkit.models.whole_layers import whole_layer_options
from sglang_kvspec.adapters import draft_weights
from sglang_kvspec.adapters.draft_weights import DraftWeights
from sglang_kvspec.adapters.weight_checkpoint import WeightCheckpoint
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.runtime.ranks import Ranks

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo-5m"
LAYER = "model.layers.0.mlp"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gptq") / "copy"
    write_gptq(DEMO, path)
    return path


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return load_file(DEMO / "model.safetensors")


def error_of(found: torch.Tensor, weight: torch.Tensor) -> float:
    return float((found - weight.float()).norm() / weight.float().norm())


@pytest.fixture
def model(tensors: dict[str, torch.Tensor]) -> Any:
    """The feed-forward block of the first layer, named as in the whole model."""
    gate, up, down = (
        tensors[f"{LAYER}.{part}_proj.weight"].float() for part in ("gate", "up", "down")
    )
    options: dict[str, Any] = {"bias": False, "params_dtype": torch.float32}
    options |= whole_layer_options()
    both = MergedColumnParallelLinear(256, [len(gate), len(up)], **options)
    back = RowParallelLinear(len(gate), 256, reduce_results=False, **options)
    both.weight.data.copy_(torch.cat((gate, up)))
    back.weight.data.copy_(down)
    layers = {f"{LAYER}.gate_up_proj": both, f"{LAYER}.down_proj": back}
    return SimpleNamespace(
        modules=lambda: layers.values(), named_modules=layers.items, layers=layers
    )


def test_a_layer_is_near_the_models_own(folder, tensors):
    found = decode(WeightCheckpoint(str(folder)).read(f"{LAYER}.down_proj", CPU))
    assert error_of(found, tensors[f"{LAYER}.down_proj.weight"]) < 0.12


def test_fused_layers_are_stacked_in_order(folder, tensors):
    checkpoint = WeightCheckpoint(str(folder))
    for fused, parts in (
        (f"{LAYER}.gate_up_proj", ("mlp.gate", "mlp.up")),
        ("model.layers.0.self_attn.qkv_proj", ("self_attn.q", "self_attn.k", "self_attn.v")),
    ):
        found = decode(checkpoint.read(fused, CPU))
        whole = torch.cat([tensors[f"model.layers.0.{part}_proj.weight"] for part in parts])
        assert error_of(found, whole) < 0.12


def test_drafts_multiply_with_the_checkpoint(folder, model):
    weights = DraftWeights(SimpleNamespace(model=model), Ranks(), WeightCheckpoint(str(folder)))
    checkpoint = WeightCheckpoint(str(folder))
    with weights.in_force():
        for name, layer in model.layers.items():
            x = torch.randn(3, layer.weight.shape[1])
            expected = x @ decode(checkpoint.read(name, CPU)).t()
            found = layer.quant_method.apply(layer, x)
            assert torch.allclose(found, expected, atol=1e-5)
    report = draft_weights.draft_weights_report(weights)
    assert (report["checkpoint"], report["made"]) == (str(folder), 1)
    weights.weights_will_change()
    weights.refresh()
    report = draft_weights.draft_weights_report(weights)
    assert (report["checkpoint"], report["made"]) == (None, 2)


def test_weights_of_another_model_are_refused(folder, model):
    model.layers[f"{LAYER}.down_proj"].weight.data.mul_(-1)
    with pytest.raises(
        ConfigError, match=r"mlp\.down_proj differs from the model's weight by 2\.0"
    ):
        DraftWeights(SimpleNamespace(model=model), Ranks(), WeightCheckpoint(str(folder)))


def test_another_shape_is_refused(folder, model):
    layer = model.layers[f"{LAYER}.down_proj"]
    layer.weight = torch.nn.Parameter(layer.weight[:100])
    with pytest.raises(
        ConfigError, match=r"down_proj is \[256, 704\], and \[100, 704\] in the model"
    ):
        DraftWeights(SimpleNamespace(model=model), Ranks(), WeightCheckpoint(str(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "quant_method gptq with 8 bits"),
        ({"quant_method": "fp8"}, "quant_method fp8 with 4 bits"),
        ({"desc_act": True}, "desc_act true"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "awq", "version": "gemv"}, "version gemv"),
    ],
)
def test_other_formats_are_refused(folder, tmp_path, changes, message):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        WeightCheckpoint(str(tmp_path))


def test_what_cannot_be_read_is_one_sentence(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        WeightCheckpoint(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        WeightCheckpoint(str(tmp_path))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        WeightCheckpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: "):
        WeightCheckpoint(str(tmp_path))


def test_a_layer_that_is_missing_is_named(folder):
    with pytest.raises(ConfigError, match=r"has no model\.layers\.0\.mlp\.lost_proj\.qweight"):
        WeightCheckpoint(str(folder)).read(f"{LAYER}.lost_proj", CPU)
