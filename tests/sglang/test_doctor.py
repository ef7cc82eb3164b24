"""`sglang-kvspec doctor` on this machine, with the real SGLang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo-5m"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_kvspec.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_this_machine_serves_the_demo_model() -> None:
    done = run("--model-path", str(MODEL))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no  " not in done.stdout
    assert f"ok server: {MODEL} can be served" in " ".join(done.stdout.split())
    assert "are applied to SGLang" in done.stdout


def test_a_flag_that_the_server_would_refuse_is_named() -> None:
    done = run("--model-path", str(MODEL), "--kvspec-recent-pages", "4", "--pp-size", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "--pp-size 2 cannot be combined with --kvspec" in done.stdout
