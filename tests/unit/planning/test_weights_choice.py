"""Weights that drafts read are chosen by what they promise for few and many requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_kvspec.planning import gains
from sglang_kvspec.planning.devices import DEVICES, PRODUCTS
from sglang_kvspec.planning.forecast import MEASURED_ACCEPTANCE, Deployment
from sglang_kvspec.planning.gains import Choice, Gain
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.weights_choice import choose_weights

CONFIG = Path(__file__).resolve().parents[3] / "examples/models/llama-3.1-8b.json"
LLAMA_8B = ModelShape.from_config(json.loads(CONFIG.read_text(encoding="utf-8")))


def deployment(**changes):
    fields = {
        "model": LLAMA_8B,
        "device": DEVICES["H100"],
        "curve": MEASURED_ACCEPTANCE["uniform4"],
        "max_requests": 48,
        "host_bytes": 0.0,
    }
    return Deployment(**fields | changes)


def test_copies_of_a_model_of_8b_pay():
    choice = choose_weights(deployment())
    assert choice.value == "int4"
    assert choice.reason.startswith("copies promise 1.")


@pytest.mark.parametrize(
    ("least", "most", "weights", "told"),
    [
        (1.1, 1.4, "int4", "1.40 times the tokens/s for 1 request of 4,096 tokens"),
        (0.985, 1.4, "int4", "1.40 times"),
        (0.97, 1.4, "target", "0.97 times the tokens/s for 48 requests of 4,096 tokens"),
        (1.0, 1.04, "target", "1.04 times"),
    ],
)
def test_copies_must_gain_somewhere_and_lose_nowhere(monkeypatch, least, most, weights, told):
    asked = []

    def compare(base, changed):
        asked.append((base.draft_weights, changed.draft_weights))
        return Gain(least, 4096, 48), Gain(most, 4096, 1)

    monkeypatch.setattr(gains, "least_and_most", compare)
    choice = choose_weights(deployment(draft_weights="int4"))
    assert choice.value == weights
    assert told in choice.reason
    assert asked == [("target", "int4")]


def test_models_and_gpus_without_copies():
    quantised = deployment(model=replace(LLAMA_8B, weight_bytes_per_param=1.0))
    assert choose_weights(quantised).value == "target"
    full = deployment(memory_share=0.24)
    assert choose_weights(full) == Choice("target", "there is no room for copies")


def test_every_product_is_a_known_gpu_on_which_kvspec_runs():
    assert all(DEVICES[name].has_figures for name in PRODUCTS.values())
