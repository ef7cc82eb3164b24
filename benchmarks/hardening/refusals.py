"""Seconds until a wrong --kvspec flag is refused on the real command line."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "demo-5m"
WRONG_FLAG, WRONG_VALUE = "--kvspec-codec", "zip"
LIMIT_S = 120.0


def measure(runs: int) -> list[float]:
    """Return the seconds of each run from start to exit, each in a process of its own.

    Raises AssertionError if a run ends with another exit code than 2, or without one sentence that
    names the flag. The first run may read SGLang's files from disk. Later runs find them cached.
    """
    return [_seconds_of_a_refusal() for _ in range(runs)]


def _seconds_of_a_refusal() -> float:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(MODEL)]
    start_s = time.perf_counter()
    run = subprocess.run(
        [*command, "--kvspec", WRONG_FLAG, WRONG_VALUE],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
    )
    seconds = time.perf_counter() - start_s
    sentences = [line for line in run.stderr.splitlines() if line.startswith("sglang-kvspec: ")]
    assert run.returncode == 2, (run.returncode, run.stderr[-2000:])
    assert "Traceback" not in run.stderr, run.stderr[-2000:]
    assert len(sentences) == 1, run.stderr[-2000:]
    assert WRONG_FLAG in sentences[0], sentences
    assert WRONG_VALUE in sentences[0], sentences
    return seconds
