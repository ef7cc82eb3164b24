"""Models whose KV may differ have different fingerprints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters import model_identity
from sglang_kvspec.adapters.model_identity import (
    arithmetic_of,
    hash_of_all_ranks,
    hash_of_weights,
    sum_of_hashes,
)
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.ranks import Ranks


@pytest.fixture
def make_model():
    """Make a small model in bf16, always with the same weights. One buffer has no elements."""

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).bfloat16()
        model.register_buffer("nothing", torch.empty(0))
        model.register_buffer("transposed", torch.randn(4, 6).t())
        return model

    return make


def config(**changes):
    values = {
        "model_path": "models/m",
        "revision": None,
        "hf_config": SimpleNamespace(to_json_string=lambda: '{"rope_theta": 1e4}'),
        "dtype": torch.bfloat16,
    }
    return SimpleNamespace(**(values | changes))


def fingerprint(model_config, model, arithmetic="cpu"):
    return model_identity.fingerprint(model_config, hash_of_weights(model), arithmetic)


def test_the_same_model_has_the_same_fingerprint(make_model):
    assert fingerprint(config(), make_model()) == fingerprint(config(), make_model())


@pytest.mark.parametrize(
    "changes",
    [
        {"model_path": "models/n"},
        {"revision": "main"},
        {"hf_config": SimpleNamespace(to_json_string=lambda: '{"rope_theta": 1e6}')},
        {"dtype": torch.float32},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_configurations_differ(make_model, changes):
    assert fingerprint(config(**changes), make_model()) != fingerprint(config(), make_model())


def test_versions_differ(make_model, monkeypatch):
    before = fingerprint(config(), make_model())
    monkeypatch.setattr(model_identity.metadata, "version", lambda name: "0.0.1")
    assert fingerprint(config(), make_model()) != before


def test_arithmetic_differs(make_model):
    before = fingerprint(config(), make_model())
    assert fingerprint(config(), make_model(), "another GPU") != before


def test_the_arithmetic_names_all_that_changes_rounding(monkeypatch):
    def said(device="cuda", deterministic=False, **options):
        args = {"device": device, "enable_deterministic_inference": deterministic}
        return arithmetic_of(SimpleNamespace(**args, _kvspec=KVSpecConfig(**options)))

    assert said(device="cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU 1")
    monkeypatch.setattr(model_identity.metadata, "version", lambda name: "1.0")
    found = {said(), said(deterministic=True), said(device="cpu")}
    # Kernels count where bits do, and where there are two of them.
    assert said(kernels="triton") == said()
    assert said(deterministic=True, kernels="triton") == said(deterministic=True)
    of_int8 = {said(deterministic=True, target="int8", kernels=each) for each in ("cuda", "auto")}
    in_triton = said(deterministic=True, target="int8", kernels="triton")
    assert len(of_int8) == 1
    assert in_triton not in of_int8
    monkeypatch.setattr(model_identity.metadata, "version", lambda name: "1.1")
    found.add(said())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU 2")
    found.add(said())
    assert len(found) == 5


@pytest.mark.parametrize(
    "name",
    ["0.weight", "0.bias", "1.weight", "1.running_mean", "1.num_batches_tracked", "transposed"],
)
def test_one_bit_of_one_weight_differs(make_model, name):
    before, model = hash_of_weights(make_model()), make_model()
    found = model.state_dict()[name]
    contiguous = found.t() if name == "transposed" else found
    contiguous.view(-1).view(torch.uint8)[-1] ^= 1
    assert hash_of_weights(model) != before


def test_weights_that_trade_places_differ(make_model):
    before, model = hash_of_weights(make_model()), make_model()
    with torch.no_grad():
        weight, bias = model[1].weight, model[1].bias
        kept = weight.clone()
        weight.copy_(bias)
        bias.copy_(kept)
    assert hash_of_weights(model) != before


def test_buffers_that_a_model_computes_do_not_count(make_model):
    """SGLang extends the table of positions for a server's drafts."""
    models = [make_model(), make_model()]
    for length, model in zip((16, 48), models, strict=True):
        model.register_buffer("cos_sin_cache", torch.zeros(length, 8), persistent=False)
    assert hash_of_weights(models[0]) == hash_of_weights(models[1])


class Gathered:
    """Stand-in for Ranks, which first records the values of each rank in turn, and then returns all
    of them."""

    def __init__(self, *models: torch.nn.Module) -> None:
        self.said: list[list[int]] = []
        for model in models:
            hash_of_all_ranks(model, self)
        self.said_by_all = self.said

    def gather(self, mine: list[int], about: object) -> list[list[int]]:
        if not hasattr(self, "said_by_all"):
            self.said.append(mine)
            return [mine]
        return self.said_by_all


def hash_of(*ranks: torch.nn.Module) -> str:
    return hash_of_all_ranks(ranks[0], Gathered(*ranks))


def shard(model: torch.nn.Module, dims: dict[str, int], size: int) -> list[torch.nn.Module]:
    """Split weights as SGLang does: some along a dimension, padded with zeros, and others in full
    on every rank."""
    made = []
    for rank in range(size):
        one = torch.nn.Module()
        for name, value in model.state_dict().items():
            own = value
            if name in dims:
                dim = dims[name]
                each = -(-value.shape[dim] // size)
                own = value.narrow(dim, rank * each, min(each, value.shape[dim] - rank * each))
                missing = list(value.shape)
                missing[dim] = each - own.shape[dim]
                own = torch.cat([own, value.new_zeros(missing)], dim)
            one.register_buffer(name.replace(".", "_"), own.clone())
        made.append(one)
    return made


DIMS = {"0.weight": 1, "0.bias": 0, "transposed": 0}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_together_have_one_hash(make_model, size):
    (whole,) = shard(make_model(), {}, 1)
    assert hash_of(*shard(make_model(), DIMS, size)) == hash_of(whole)
    assert hash_of_all_ranks(whole, Ranks()) == hash_of(whole)


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.running_mean", "transposed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_bit_of_one_weight_on_one_rank_differs(make_model, rank, name):
    ranks = shard(make_model(), DIMS, 2)
    before = hash_of(*ranks)
    found = ranks[rank].state_dict()[name.replace(".", "_")]
    found.view(-1).view(torch.uint8)[0] ^= 1
    assert hash_of(*ranks) != before


def test_weights_that_trade_places_differ_on_all_ranks(make_model):
    model = make_model()
    before = hash_of(*shard(model, DIMS, 2))
    with torch.no_grad():
        weight, bias = model[1].weight, model[1].bias
        kept = weight.clone()
        weight.copy_(bias)
        bias.copy_(kept)
    assert hash_of(*shard(model, DIMS, 2)) != before


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_of_hashes_is_that_of_its_parts(dtype):
    numbers = (torch.randn(7, 13, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    parts = sum(map(sum_of_hashes, (numbers[:, :5], numbers[:3, 5:], numbers[3:, 5:])))
    assert (parts - sum_of_hashes(numbers)) % (1 << 64) == 0
    assert sum_of_hashes(torch.zeros(3, dtype=dtype)) == sum_of_hashes(numbers[:0]) == 0
