"""The GPU, as nvidia-smi sees it: asking torch would take memory on it."""

from __future__ import annotations

import os
import platform
import subprocess

_TIMEOUT_S = 20.0


def gpu_names() -> list[str]:
    """Empty on a machine without a GPU."""
    return _query("name")


def describe() -> str:
    names = gpu_names()
    if not names:
        return f"{platform.machine()} CPU"
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"


def hbm_used_gib() -> float | None:
    """Of all GPUs that servers may use together, None where there is none."""
    used = _query("memory.used")
    return sum(float(mib) for mib in used) / 1024 if used else None


def _query(field: str) -> list[str]:
    """Of the GPUs that CUDA_VISIBLE_DEVICES leaves to servers."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
