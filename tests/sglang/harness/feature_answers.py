"""Servers that answer the cases of features.py, and the comparison of two answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests
from harness.features import CASES, generate
from harness.models import DEMO_MODEL
from harness.servers import ServerSpec

CHAT_TEMPLATE = f"--chat-template={Path(__file__).with_name('chat.jinja')}"
_SHARED = (
    "--max-total-tokens=24576",
    "--enable-metrics",
    "--grammar-backend=xgrammar",
    CHAT_TEMPLATE,
    "--enable-return-hidden-states",
    "--enable-custom-logit-processor",
)
PLAIN = ServerSpec(DEMO_MODEL, _SHARED)
# A residual cache far smaller than the prompts causes fetches, evictions and streamed reads.
KVSPEC = ServerSpec(DEMO_MODEL, (*_SHARED, "--kvspec", "--kvspec-residual-hbm-fraction=0.05"))
KVSPEC_STAGGERED = ServerSpec(DEMO_MODEL, (*KVSPEC.arguments, "--kvspec-schedule=staggered"))
KVSPEC_NGRAM = ServerSpec(
    DEMO_MODEL, (*KVSPEC.arguments, "--kvspec-drafter=ngram", "--kvspec-ngram-shared=true")
)

# Logits differ in the last bits, since forward passes batch tokens differently.
LOGPROB_TOLERANCE = 2e-4

# Seeds of sampled answers.
SEEDS = (1, 2)


def answer_to(name: str, url: str) -> Any:
    """Return a case's answer as JSON carries it."""
    return json.loads(json.dumps(CASES[name](url)))


def sample(url: str, seed: int) -> list[int]:
    options = {"temperature": 0.9, "sampling_seed": seed, "max_new_tokens": 48}
    return generate(url, **options)["output_ids"]


def report_of(url: str) -> dict[str, Any]:
    """Return the kvspec section of /server_info."""
    info = requests.get(f"{url}/server_info", timeout=60).json()
    return info["internal_states"][0]["kvspec"]


def assert_same(actual: Any, wanted: Any, where: str) -> None:
    """Check for equal structure and values, with floats within LOGPROB_TOLERANCE."""
    if isinstance(wanted, dict):
        assert actual.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_same(actual[key], value, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(actual) == len(wanted), where
        for index, value in enumerate(wanted):
            assert_same(actual[index], value, f"{where}[{index}]")
    elif isinstance(wanted, float):
        assert actual == pytest.approx(wanted, abs=LOGPROB_TOLERANCE), where
    else:
        assert actual == wanted, where
