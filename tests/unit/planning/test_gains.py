"""Tokens a second of one deployment over another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_kvspec.planning import gains
from sglang_kvspec.planning.devices import DEVICES
from sglang_kvspec.planning.forecast import MEASURED_ACCEPTANCE, Deployment
from sglang_kvspec.planning.gains import Gain, least_and_most
from sglang_kvspec.planning.model_shape import ModelShape

CONFIG = Path(__file__).resolve().parents[3] / "examples/models/llama-3.1-8b.json"
LLAMA_8B = ModelShape.from_config(json.loads(CONFIG.read_text(encoding="utf-8")))
BASE = Deployment(
    model=LLAMA_8B,
    device=DEVICES["H100"],
    curve=MEASURED_ACCEPTANCE["uniform4"],
    max_requests=48,
    host_bytes=0.0,
)
COPIES = replace(BASE, draft_weights="int4")


@pytest.fixture
def rates(monkeypatch):
    """Return a function that sets the rates of deployments at a context, and what was asked for."""
    asked = set()

    def use(rate):
        def noted(deployment, context_len):
            asked.add((context_len, deployment.max_requests, deployment.draft_weights))
            expected = SimpleNamespace(tokens_per_s=rate(deployment, context_len))
            return SimpleNamespace(fetched=expected)

        monkeypatch.setattr(gains, "forecast", noted)
        return asked

    return use


def test_few_and_many_requests_of_short_and_long_contexts_are_compared(rates):
    def rate(deployment, context_len):
        faster = {4096: 1.5, 32768: 3.0}[context_len] / deployment.max_requests**0.5
        return 100.0 * (faster if deployment.draft_weights == "int4" else 1.0)

    asked = rates(rate)
    least, most = least_and_most(BASE, COPIES)
    assert (most.ratio, most.context_len, most.num_requests) == (3.0, 32768, 1)
    assert (least.context_len, least.num_requests) == (4096, 48)
    assert asked == {(c, n, w) for c in (4096, 32768) for n in (1, 48) for w in ("target", "int4")}


def test_a_short_model_is_compared_at_its_own_length(rates):
    asked = rates(lambda deployment, context_len: 1.0)
    short = replace(BASE, model=replace(LLAMA_8B, max_context=2048), max_requests=1)
    least_and_most(short, replace(short, draft_weights="int4"))
    assert {place[:2] for place in asked} == {(2048, 1)}


def test_where_nothing_fits_there_is_no_gain(rates):
    rates(lambda deployment, context_len: 0.0)
    assert least_and_most(BASE, COPIES)[0].ratio == 1.0


def test_a_gain_is_told():
    assert str(Gain(1.404, 4096, 1)) == "1.40 times the tokens/s for 1 request of 4,096 tokens"
    assert str(Gain(0.97, 32768, 48)) == "0.97 times the tokens/s for 48 requests of 32,768 tokens"
