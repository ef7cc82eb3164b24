"""The form of residuals in host memory is chosen by what it promises for few and many requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_kvspec.core.units import GIB
from sglang_kvspec.planning import gains
from sglang_kvspec.planning.devices import DEVICES
from sglang_kvspec.planning.forecast import MEASURED_ACCEPTANCE, Deployment
from sglang_kvspec.planning.gains import Gain
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.residual_choice import choose_residual

CONFIG = Path(__file__).resolve().parents[3] / "examples/models/llama-3.1-8b.json"
LLAMA_8B = ModelShape.from_config(json.loads(CONFIG.read_text(encoding="utf-8")))


def deployment(**changes):
    fields = {
        "model": LLAMA_8B,
        "device": DEVICES["H200"],
        "curve": MEASURED_ACCEPTANCE["uniform4"],
        "max_requests": 64,
        "host_bytes": 50.0 * GIB,
    }
    return Deployment(**fields | changes)


def test_little_host_memory_is_worth_packing():
    choice = choose_residual(deployment())
    assert choice.value == "packed"
    assert choice.reason.endswith("times the tokens/s for 64 requests of 32,768 tokens")


def test_more_host_memory_than_requests_need_is_not():
    choice = choose_residual(deployment(host_bytes=400.0 * GIB, max_requests=16))
    assert choice.value == "raw"
    assert choice.reason.startswith("packed residuals promise 1.00")


def test_without_host_memory_residuals_stay_raw():
    choice = choose_residual(deployment(host_bytes=0.0))
    assert (choice.value, choice.reason) == ("raw", "there is no host memory for residuals")


@pytest.mark.parametrize("changes", [{"codec": "log4"}, {"target": "int8"}])
def test_what_cannot_be_packed_stays_raw(changes):
    changes["curve"] = MEASURED_ACCEPTANCE[changes.get("codec", "uniform4")]
    choice = choose_residual(deployment(**changes))
    assert choice.value == "raw"
    assert "needs --target exact, --codec uniform4" in choice.reason


@pytest.mark.parametrize(
    ("least", "most", "form", "told"),
    [
        (0.98, 1.25, "packed", "1.25 times the tokens/s for 64 requests of 4,096 tokens"),
        (0.98, 1.24, "raw", "1.24 times"),
        (0.97, 1.9, "raw", "0.97 times the tokens/s for 1 request of 4,096 tokens"),
    ],
)
def test_a_gain_must_be_clear_and_cost_little_elsewhere(monkeypatch, least, most, form, told):
    asked = []

    def compare(base, changed):
        asked.append((base.exact_residual, changed.exact_residual))
        return Gain(least, 4096, 1), Gain(most, 4096, 64)

    monkeypatch.setattr(gains, "least_and_most", compare)
    choice = choose_residual(replace(deployment(), exact_residual="packed"))
    assert choice.value == form
    assert told in choice.reason
    assert asked == [("raw", "packed")]
