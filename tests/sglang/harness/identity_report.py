"""Figures of an identity run, in the JSON form of benchmarks/results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.comparison import Mismatch
from harness.shard import Shard

_VERSIONS_OF = ("sglang", "torch", "transformers", "networkx", "aiohttp")
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class ScenarioResult:
    """What one scenario on one server found. baseline: what answers were compared with."""

    model: str
    setting: str
    scenario: str
    baseline: str
    num_prompts: int
    num_answers: int
    num_retractions: int
    mismatches: tuple[Mismatch, ...]
    elapsed_s: float

    @property
    def name(self) -> str:
        return f"{self.model}.{self.setting}.{self.scenario}".replace(", ", "+").replace(" ", "_")


class IdentityReport:
    """Collects results, and writes what there is after each, so that a run cut short counts."""

    def __init__(self, path: Path | None, *, settings: dict[str, Any], shard: Shard) -> None:
        self._path = path
        self._settings = settings
        self._shard = shard
        self._results: list[ScenarioResult] = []

    def add(self, result: ScenarioResult) -> None:
        self._results.append(result)
        if self._path is not None:
            self._write(self._path)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "bench": "identity",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "machine": _machine(),
            "versions": {"python": platform.python_version()}
            | {name: metadata.version(name) for name in _VERSIONS_OF},
            "settings": self._settings,
            "shard": str(self._shard),
            "figures": self._figures(),
            "mismatches": [
                {"in": result.name, **asdict(mismatch)}
                for result in self._results
                for mismatch in result.mismatches
            ],
        }
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        unfinished.rename(path)

    def _figures(self) -> list[dict[str, Any]]:
        prompts_of_model: dict[str, int] = {}
        for result in self._results:
            seen = prompts_of_model.get(result.model, 0)
            prompts_of_model[result.model] = max(seen, result.num_prompts)
        total = [
            _figure("identity.prompts", sum(prompts_of_model.values()), "prompts"),
            _figure("identity.answers", sum(r.num_answers for r in self._results), "answers"),
            _figure(
                "identity.mismatches", sum(len(r.mismatches) for r in self._results), "answers"
            ),
        ]
        for result in self._results:
            prefix, baseline = f"identity.{result.name}", result.baseline
            total += [
                _figure(f"{prefix}.prompts", result.num_prompts, "prompts"),
                _figure(f"{prefix}.answers", result.num_answers, "answers"),
                _figure(f"{prefix}.mismatches", len(result.mismatches), "answers", baseline),
                _figure(f"{prefix}.retractions", result.num_retractions, "retractions"),
                _figure(f"{prefix}.elapsed", round(result.elapsed_s, 1), "s"),
            ]
        return total


def _figure(name: str, value: float, unit: str, baseline: str | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "spread": None, "baseline": baseline}


def _commit() -> str:
    """The commit this file is at, and whether tracked files differ from it."""
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
