"""GPUs of this machine, as nvidia-smi reports them: asking torch would take GPU memory."""

from __future__ import annotations

import os
import platform
import subprocess

_TIMEOUT_S = 20.0


def gpu_names() -> list[str]:
    """Return the names of the GPUs, empty on a machine without one."""
    return _query("name")


def describe() -> str:
    names = gpu_names()
    if not names:
        return f"{platform.machine()} CPU"
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"


def hbm_used_gib() -> float | None:
    """Return the memory in use, summed over the GPUs that servers may use; None without a GPU."""
    used = _query("memory.used")
    return sum(float(mib) for mib in used) / 1024 if used else None


def _query(field: str) -> list[str]:
    """Return a field of each GPU that CUDA_VISIBLE_DEVICES leaves to servers. Return none if
    nvidia-smi fails."""
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
