"""Head of every result file in benchmarks/results, and the writer of such files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_VERSIONS_OF = ("sglang", "torch", "transformers", "networkx", "aiohttp")
_CPU_INFO = Path("/proc/cpuinfo")


def write_record(
    path: Path,
    bench: str,
    settings: dict[str, Any],
    figures: Sequence[dict[str, Any]],
    **more: Any,
) -> None:
    """Write a run's record atomically, so that a reader never sees a part of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "bench": bench,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": _machine(),
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in _VERSIONS_OF},
        "settings": settings,
        **more,
        "figures": list(figures),
    }
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.rename(path)


def figure(name: str, value: float, unit: str, baseline: str | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "spread": None, "baseline": baseline}


def _commit() -> str:
    """Return the commit of this file, and whether tracked files differ from it."""
    here = Path(__file__).parent
    described = subprocess.run(
        (
            "git",
            "describe",
            "--always",
            "--abbrev=40",
            "--dirty= with local changes",
            "--exclude=*",
        ),
        cwd=here,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip() if described.returncode == 0 else "not a git checkout"


def _machine() -> dict[str, Any]:
    names: Sequence[str] = ()
    if _CPU_INFO.exists():
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
