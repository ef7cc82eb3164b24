"""Weights that drafts read are chosen by what they promise for few and many requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_kvspec.planning import weights_choice
from sglang_kvspec.planning.devices import DEVICES, PRODUCTS
from sglang_kvspec.planning.forecast import MEASURED_ACCEPTANCE, Deployment
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


@pytest.fixture
def gains(monkeypatch):
    """Return a function that sets the gain of a context and number of requests, and the names of
    those that were asked for."""
    asked = []

    def use(gain):
        def noted(deployment, context_len):
            asked.append((context_len, deployment.max_requests))
            return gain(context_len, deployment.max_requests)

        monkeypatch.setattr(weights_choice, "_gain", noted)
        return asked

    return use


def test_copies_of_a_model_of_8b_pay():
    choice = choose_weights(deployment())
    assert choice.weights == "int4"
    assert choice.reason.startswith("copies promise 1.")


@pytest.mark.parametrize(
    ("few", "many", "weights", "told"),
    [
        (1.4, 1.1, "int4", "1.40 times the tokens/s for 1 request of 4,096 tokens"),
        (1.4, 0.985, "int4", "1.40 times"),
        (1.4, 0.97, "target", "0.97 times the tokens/s for 48 requests of 4,096 tokens"),
        (1.04, 1.0, "target", "1.04 times"),
    ],
)
def test_copies_must_gain_somewhere_and_lose_nowhere(gains, few, many, weights, told):
    asked = gains(lambda context_len, count: few if count == 1 else many)
    choice = choose_weights(deployment())
    assert choice.weights == weights
    assert told in choice.reason
    assert asked == [(4096, 1), (4096, 48), (32768, 1), (32768, 48)]


def test_contexts_are_no_longer_than_the_models(gains):
    asked = gains(lambda context_len, count: 1.0)
    choose_weights(deployment(model=replace(LLAMA_8B, max_context=2048), max_requests=1))
    assert asked == [(2048, 1)]


def test_models_and_gpus_without_copies():
    quantised = deployment(model=replace(LLAMA_8B, weight_bytes_per_param=1.0))
    assert choose_weights(quantised).weights == "target"
    full = deployment(memory_share=0.24)
    assert choose_weights(full) == weights_choice.WeightsChoice(
        "target", "there is no room for copies"
    )


def test_every_product_is_a_known_gpu_on_which_kvspec_runs():
    assert all(DEVICES[name].has_figures for name in PRODUCTS.values())
