"""Models that tests run. They ship with the repository, or lie beside it."""

import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

DEMO_MODEL = REPOSITORY / "models" / "demo-5m"
# Too large to ship. Tests that need this model skip where it is absent.
EVAL_MODEL = REPOSITORY.parent / "shared" / "models" / "eval-31m"


def chat_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, which is downloaded once. Skip the test where it
    cannot be had."""
    script = REPOSITORY / "models" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", script)
    assert spec is not None
    assert spec.loader is not None
    smollm2 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smollm2)
    try:
        return Path(smollm2.ensure())
    except smollm2.ModelUnavailable as unavailable:
        pytest.skip(str(unavailable))
