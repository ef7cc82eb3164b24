"""Puts the benchmarks' own packages on sys.path, as they are for a script that runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


@pytest.fixture
def identity_path(tmp_path):
    """Result file as bench_gpu_identity.py writes it on an H200, in a folder of its own."""
    name = "identity.gpu.mismatches_vs_draft_off"
    row = {"unit": "of 200 answers", "spread": None, "baseline": 0}
    result = {
        "commit": "330bf0a107c9bb8f",
        "date": "2026-11-21T21:43:44+00:00",
        "machine": "H200",
        "settings": {
            "model": "eval-31m",
            "prompts": 200,
            "prompt_tokens": "100 to 6000",
            "new_tokens": 256,
        },
        "figures": [
            {"name": name, "value": 41, **row},
            {"name": f"{name}.beyond_a_tie", "value": 0, **row},
            {"name": f"{name}.largest_gap", "value": 0.125, **row},
            {"name": "something.else", "value": 1, **row},
        ],
    }
    path = tmp_path / "identity" / "result.json"
    path.parent.mkdir()
    path.write_text(json.dumps(result), encoding="utf-8")
    return path
