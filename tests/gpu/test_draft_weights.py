"""Copies of weights that captured drafts read, and the memory that it takes to make them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.linear import ColumnParallelLinear

from kvspec_kernels.reference import int4_weights
from kvspec_kernels.reference.int4_weights import compensated_by, compensation, decode
from sglang_kvspec.adapters import draft_weights
from sglang_kvspec.adapters.draft_weights import FACTORS, MARGIN_BYTES, DraftWeights
from sglang_kvspec.adapters.weight_copies import KERNELS, WeightCopy
from sglang_kvspec.runtime.ranks import Ranks

DEVICE = torch.device("cuda:0")
# Inputs of the widest layer of a model of 8B, as its rank sees them.
WIDE = 14336


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Two layers with independent inputs."""

    def moments(runner: object, layers: list, texts: torch.Tensor) -> list[torch.Tensor]:
        return [torch.eye(layer.weight.shape[1], device=DEVICE) for layer in layers]

    monkeypatch.setattr(draft_weights, "write_texts", lambda *_: None)
    monkeypatch.setattr(draft_weights, "input_moments", moments)
    monkeypatch.setattr(draft_weights, "least_of_all_ranks", lambda value: value)
    options = {"bias": False, "params_dtype": torch.bfloat16, "tp_rank": 0, "tp_size": 1}
    layers = [ColumnParallelLinear(1000, 512, **options), ColumnParallelLinear(512, 256, **options)]
    torch.manual_seed(0)
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=layer.weight.shape[1] ** -0.5)
    return torch.nn.Sequential(*layers).to(DEVICE).requires_grad_(False)


def through_copies(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = x.float() @ decode(int4_weights.round_to_nearest(layer.weight)).t()
    return x


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_captured_drafts_follow_new_weights(model: torch.nn.Module) -> None:
    weights = DraftWeights(SimpleNamespace(model=model), Ranks())
    x = torch.randn(5, 1000, device=DEVICE).bfloat16()

    def step() -> torch.Tensor:
        return model[1](model[0](x)[0])[0]

    with weights.in_force():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
    for factor in (1, -2):
        weights.weights_will_change()
        model[0].weight.mul_(factor)
        with torch.inference_mode():
            weights.refresh()
        out.fill_(float("nan"))
        graph.replay()
        # 4 bits round a weight by a tenth of its size.
        assert distance(out, through_copies(model, x)) < 0.02
        assert distance(step(), through_copies(model, x)) > 0.05
        assert distance(out, step()) < 0.3


def test_a_wide_layer_takes_no_more_memory_than_is_kept_for_it() -> None:
    """Fewer tokens than inputs, of which some are a thousand times as large as others."""
    torch.manual_seed(0)
    x = torch.randn(8192, WIDE, device=DEVICE)
    x[:, :4] *= 1000
    moment = x.t() @ x
    del x
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    factor = compensation(moment)
    assert torch.cuda.max_memory_allocated() - held <= FACTORS * moment.nbytes
    assert bool(factor.isfinite().all())

    weight = torch.randn(4096, WIDE, device=DEVICE).bfloat16()
    copy = WeightCopy(weight, KERNELS)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    encode = partial(compensated_by, factor=factor, round_group=KERNELS.round_group)
    copy.write(weight, encode)
    assert torch.cuda.max_memory_allocated() - held <= MARGIN_BYTES
