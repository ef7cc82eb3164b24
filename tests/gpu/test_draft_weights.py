"""Copies of weights that captured drafts read, and the memory that it takes to make them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.linear import ColumnParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from kvspec_kernels.ops.capture import captured_graph
from kvspec_kernels.reference import int4_weights
from kvspec_kernels.reference.int4_weights import compensated_by, compensation, decode
from sglang_kvspec.adapters import draft_weights
from sglang_kvspec.adapters.draft_weights import FACTORS, MARGIN_BYTES, DraftWeights
from sglang_kvspec.adapters.weight_copies import COMPENSATED_AT_ONCE, KERNELS, WeightCopy
from sglang_kvspec.runtime.ranks import Ranks

DEVICE = torch.device("cuda:0")
# Inputs of the widest layer of a model of 8B, as its rank sees them.
WIDE = 14336
# Weights [N, K] of that layer, of the one before it, and of the vocabulary projection of Llama 3.
LARGE = [(4096, WIDE), (28672, 4096), (128256, 4096)]
# Tokens of Llama 2, SmolLM2, Llama 3 and Qwen3. SGLang pads the first to 1,088 rows, which are no
# whole tiles.
VOCABULARIES = [1080, 32000, 49152, 128256, 151936]
LINEAR = {"bias": False, "params_dtype": torch.bfloat16, "tp_rank": 0, "tp_size": 1}


@pytest.fixture(autouse=True)
def independent_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def moments(runner: object, layers: list, texts: torch.Tensor) -> list[torch.Tensor]:
        return [torch.eye(layer.weight.shape[1], device=DEVICE) for layer in layers]

    monkeypatch.setattr(draft_weights, "write_texts", lambda *_: None)
    monkeypatch.setattr(draft_weights, "input_moments", moments)
    monkeypatch.setattr(draft_weights, "least_of_all_ranks", lambda value: value)


@pytest.fixture
def model() -> torch.nn.Module:
    layers = [ColumnParallelLinear(1000, 512, **LINEAR), ColumnParallelLinear(512, 256, **LINEAR)]
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
        with captured_graph() as graph:
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


class Decoder(torch.nn.Module):
    """A linear layer, and a vocabulary projection."""

    def __init__(self, num_tokens: int, num_inputs: int) -> None:
        super().__init__()
        self.layer = ColumnParallelLinear(num_inputs, 64, **LINEAR)
        self.lm_head = ParallelLMHead(
            num_tokens, num_inputs, params_dtype=torch.bfloat16, enable_tp=False
        )
        for part in self.parameters():
            torch.nn.init.normal_(part, std=num_inputs**-0.5)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        processor = SimpleNamespace(use_fp32_lm_head=False, rl_on_policy_target=None)
        return LogitsProcessor._compute_lm_head(processor, x, self.lm_head)


@pytest.mark.parametrize("num_tokens", VOCABULARIES)
def test_captured_drafts_get_logits_from_a_copy(num_tokens: int) -> None:
    torch.manual_seed(0)
    with DEVICE:
        model = Decoder(num_tokens, 1024).requires_grad_(False)
    weights = DraftWeights(SimpleNamespace(model=model), Ranks())
    weight = model.lm_head.weight
    for num_rows in (1, 16, 17, 48, 64):
        x = torch.randn(num_rows, 1024, device=DEVICE).bfloat16()
        exact = model.logits(x)
        with weights.in_force():
            model.logits(x)
            torch.cuda.synchronize()
            with captured_graph() as graph:
                out = model.logits(x)
        assert (out.dtype, out.shape) == (exact.dtype, exact.shape)
        assert torch.equal(model.logits(x), exact)
        for factor in (1, -2):
            weights.weights_will_change()
            weight.mul_(factor)
            weights.refresh()
            out.fill_(float("nan"))
            graph.replay()
            copied = decode(int4_weights.round_to_nearest(weight))
            assert distance(out, x.float() @ copied.t()) < 0.01
            # 4 bits round a weight by a tenth of its size.
            assert 0.05 < distance(out, model.logits(x)) < 0.3


@pytest.mark.parametrize(("num_outputs", "num_inputs"), LARGE)
def test_a_large_layer_takes_no_more_memory_than_is_kept_for_it(
    num_outputs: int, num_inputs: int
) -> None:
    """Fewer tokens than inputs, of which some are a thousand times as large as others."""
    torch.manual_seed(0)
    x = torch.randn(min(8192, num_inputs // 2), num_inputs, device=DEVICE)
    x[:, :4] *= 1000
    moment = x.t() @ x
    del x
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    factor = compensation(moment)
    assert torch.cuda.max_memory_allocated() - held <= FACTORS * moment.nbytes
    assert bool(factor.isfinite().all())

    weight = torch.randn(num_outputs, num_inputs, device=DEVICE).bfloat16()
    copy = WeightCopy(weight, KERNELS)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    encode = partial(compensated_by, factor=factor, round_group=KERNELS.round_group)
    copy.write(weight, encode, COMPENSATED_AT_ONCE)
    assert torch.cuda.max_memory_allocated() - held <= MARGIN_BYTES
