"""Files that scorers read: the surrogate of KVzip, and the calibration of KV heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from acceptance.model import Llama
from acceptance.prompts import cut_prompts
from acceptance.ridge import Explained, RidgeSums
from calibrate_duo import REPEATED, retrieval, squares, with_repeats
from train_kvzap import explain, tensors_of, train

from sglang_kvspec.scorers.base import ALWAYS, Needs

MODEL = Path(__file__).resolve().parents[3] / "models" / "demo-5m"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return Llama(MODEL, CPU)


@pytest.fixture(scope="module")
def prompts():
    return cut_prompts(MODEL, 3, 192)[0]


def known_map(num_inputs, num_outputs):
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=chance)
    return weight, torch.randn(num_outputs, generator=chance)


def test_ridge_regression_recovers_a_linear_map_from_parts():
    weight, bias = known_map(12, 3)
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(1)) + 5
    y = x @ weight.T + bias
    sums = RidgeSums(12, 3, CPU)
    for some, values in zip(x.split(64), y.split(64), strict=True):
        sums.add(some, values)
    found = sums.solve(0.0)
    torch.testing.assert_close(found.weight, weight, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.bias, bias, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found(x), y, atol=1e-3, rtol=1e-4)


def test_a_penalty_shrinks_weights_and_leaves_the_mean():
    x = torch.randn(500, 4, generator=torch.Generator().manual_seed(2))
    y = 7 + x[:, :1]
    sums = RidgeSums(4, 1, CPU)
    sums.add(x, y)
    # As large as all inputs together: weights are halved.
    half = sums.solve(1.0)
    assert half.weight[0, 0] == pytest.approx(0.5, abs=0.1)
    assert float(half(x).mean()) == pytest.approx(float(y.mean()), abs=1e-4)


def test_explained_variance_is_that_of_all_parts():
    chance = torch.Generator().manual_seed(3)
    y = torch.randn(100, 2, generator=chance)
    predicted = y + 0.3 * torch.randn(100, 2, generator=chance)
    explained = Explained(2, CPU)
    for part in range(0, 100, 30):
        explained.add(predicted[part : part + 30], y[part : part + 30])
    expected = 1 - (predicted - y).square().sum(0) / (y - y.mean(0)).square().sum(0)
    torch.testing.assert_close(explained.shares().float(), expected)


@dataclass
class LinearTeacher:
    """Scorer whose scores are the exponentials of a linear map of hidden states."""

    weight: torch.Tensor
    bias: torch.Tensor
    needs: Needs = field(default_factory=lambda: Needs(hidden=True))
    allocation: str = "head"

    def score(self, chunk):
        logs = chunk.hidden @ self.weight.T + self.bias
        scores = torch.cat((chunk.scores, logs.T.exp()), dim=1)
        scores[:, :4] = ALWAYS
        return scores


def test_a_surrogate_learns_a_linear_teacher_in_every_layer(model, prompts):
    hidden_size = model.weights["embed_tokens.weight"].shape[1]
    weight, bias = known_map(hidden_size, model.shape.num_kv_heads)
    teacher = LinearTeacher(weight / hidden_size, bias)
    layers = train(model, prompts[:2], teacher, 1e-9)
    explained = explain(model, prompts[2:], teacher, layers)
    assert explained.shape == (model.shape.num_layers, model.shape.num_kv_heads)
    # Inputs of layer 0 are tokens, of which a new prompt has some that training has not seen.
    assert float(explained[1:].min()) > 0.99
    assert float(explain(model, prompts[:2], teacher, layers).min()) > 0.99
    tensors = tensors_of(layers)
    assert set(tensors) == {
        f"layers.{i}.{name}" for i in range(model.shape.num_layers) for name in ("weight", "bias")
    }
    assert tensors["layers.0.weight"].shape == (model.shape.num_kv_heads, hidden_size)
    assert tensors["layers.0.bias"].shape == (model.shape.num_kv_heads,)


def test_prompts_repeat_a_passage_at_their_end():
    prompts = torch.arange(64).repeat(2, 1)
    found = with_repeats(prompts)
    assert found.shape == prompts.shape
    size = 64 // REPEATED
    assert torch.equal(found[:, -size:], found[:, 16 : 16 + size])
    assert torch.equal(found[:, :-size], prompts[:, :-size])


def test_errors_of_heads_are_those_of_attention_without_far_tokens():
    chance = torch.Generator().manual_seed(4)
    heads, kv_heads, count, total, dim, sinks, recent = 4, 2, 5, 30, 8, 3, 6
    q = torch.randn(heads, count, dim, generator=chance)
    k = torch.randn(kv_heads, total, dim, generator=chance)
    v = torch.randn(kv_heads, total, dim, generator=chance)
    start = 20
    found = squares(q, k, v, start, sinks, recent)
    expected = torch.zeros(2, kv_heads, dtype=torch.float64)
    for head in range(heads):
        kv = head // (heads // kv_heads)
        for i in range(count):
            own = start + i
            everything = list(range(own + 1))
            near = [at for at in everything if at < sinks or at > own - recent]
            assert len(near) == sinks + recent
            outputs = []
            for places in (everything, near):
                weights = (k[kv, places] @ q[head, i] * dim**-0.5).softmax(0)
                outputs.append(weights @ v[kv, places])
            expected[0, kv] += (outputs[1] - outputs[0]).double().square().sum()
            expected[1, kv] += outputs[0].double().square().sum()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_no_head_errs_where_all_tokens_are_near(model, prompts):
    size = (model.shape.num_layers, model.shape.num_kv_heads)
    near = retrieval(model, prompts[:1], sinks=1, recent=prompts.shape[1])
    far = retrieval(model, prompts[:1], sinks=1, recent=8)
    assert near.shape == far.shape == size
    assert float(near.max()) == 0
    assert float(far.min()) > 0
