"""KVzap: scores of a surrogate that is read from a file."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.scorers.base import ALWAYS, LayerChunk
from sglang_kvspec.scorers.kvzap import KVzap

WEIGHT, BIAS = torch.ones(3, 12), torch.ones(3)


def by_loops(layer, file, index, window, cached=0):
    tensors = load_file(file)
    weight, bias = tensors[f"layers.{index}.weight"], tensors[f"layers.{index}.bias"]
    scores = torch.full((len(bias), layer.num_tokens), ALWAYS, dtype=torch.float64)
    for head in range(len(bias)):
        for token in range(cached, layer.num_tokens - window):
            log = weight[head].double() @ layer.hidden[token].double() + bias[head]
            scores[head, token] = math.exp(log)
    return scores


@pytest.mark.parametrize("ends", [[20], [12, 20], [3, 17, 18, 20]])
@pytest.mark.parametrize("cached", [0, 2])
@pytest.mark.parametrize("index", [0, 1])
def test_scores_are_predicted_but_for_a_cached_prefix_and_the_window(
    make_layer, surrogate_file, ends, cached, index
):
    layer = make_layer(20)
    scorer = KVzap(str(surrogate_file), window=4)
    found = layer.run(scorer, ends, cached=cached, layer=index)
    expected = by_loops(layer, surrogate_file, index, 4, cached)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("ends", [[8], [1, 5, 8]])
def test_a_prompt_that_is_no_longer_than_the_window_is_read(make_layer, surrogate_file, ends):
    assert (make_layer(8).run(KVzap(str(surrogate_file), window=8), ends) == ALWAYS).all()


def test_a_very_large_prediction_does_not_force_a_token_in(make_layer, tmp_path):
    path = tmp_path / "large.safetensors"
    save_file({"layers.0.weight": WEIGHT, "layers.0.bias": 1000 * BIAS}, path)
    scores = make_layer(200).run(KVzap(str(path)))
    assert scores[:, :72].isfinite().all()
    assert scores[:, :72].sum().isfinite()


def test_memory_holds_no_more_than_the_window(make_layer, surrogate_file):
    memory = {}
    layer = make_layer(20)
    tensors = (layer.queries, 1.0, layer.keys, layer.values, torch.empty(3, 0), memory)
    KVzap(str(surrogate_file), window=4).score(LayerChunk(0, 0, 0, 20, *tensors, layer.hidden))
    assert memory["logs"].untyped_storage().nbytes() == 3 * 4 * memory["logs"].itemsize


def test_a_file_is_needed():
    with pytest.raises(ConfigError, match="--kvspec-compressor kvzap:file=PATH") as error:
        KVzap()
    assert "benchmarks/train_kvzap.py" in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, "cannot be read as safetensors"),
        ({"other": BIAS}, "has no layers.0.weight"),
        ({"layers.0.weight": WEIGHT}, "layers.0 needs weight"),
        ({"layers.0.weight": BIAS.clone(), "layers.0.bias": BIAS}, "layers.0 needs weight"),
        ({"layers.0.weight": WEIGHT, "layers.0.bias": BIAS[:2]}, "layers.0 needs weight"),
        ({"layers.0.weight": WEIGHT / 0, "layers.0.bias": BIAS}, "not finite"),
        ({"layers.0.weight": WEIGHT, "layers.0.bias": BIAS * math.nan}, "not finite"),
    ],
)
def test_other_files_are_refused(tmp_path, tensors, message):
    path = tmp_path / "surrogate.safetensors"
    if tensors is not None:
        save_file(tensors, path)
    with pytest.raises(ConfigError, match=f"--kvspec-compressor kvzap:file={path}.*{message}"):
        KVzap(str(path))


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    path = tmp_path / "text"
    path.write_text("no tensors")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        KVzap(str(path))


@pytest.mark.parametrize(("heads", "index", "size"), [(3, 2, 12), (4, 0, 12), (3, 0, 11)])
def test_a_file_of_another_model_is_refused(make_layer, surrogate_file, heads, index, size):
    layer = make_layer(5, num_kv_heads=heads)
    layer.hidden = layer.hidden[:, :size]
    message = f"another model: layer {index}, {heads} KV heads and hidden size {size} are needed"
    with pytest.raises(ConfigError, match=message):
        layer.run(KVzap(str(surrogate_file)), layer=index)
