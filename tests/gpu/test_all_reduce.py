"""Sums over ranks under deterministic inference: the bits of a row do not depend on the other rows.

With two ranks every order gives the same sum. With more, the order must not depend on the batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("sum_of_ranks.py")
TIMEOUT_S = 240.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_rows_do_not_depend_on_their_number(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(ranks), str(tmp_path / "meeting")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    codes = [process.returncode for process in started]
    assert codes == [0] * ranks, "\n".join(text[-2000:] for text in said)
