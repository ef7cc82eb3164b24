"""Figures of an identity run, in the JSON form of benchmarks/results."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.comparison import Mismatch
from harness.run_record import figure, write_record
from harness.shard import Shard


@dataclass(frozen=True)
class ScenarioResult:
    """Result of one scenario on one server. baseline: the reference that answers were compared
    with."""

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
    """Collect results, and write the report after each, so that an interrupted run leaves a
    report."""

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
        mismatches = [
            {"in": result.name, **asdict(mismatch)}
            for result in self._results
            for mismatch in result.mismatches
        ]
        more = {"shard": str(self._shard), "mismatches": mismatches}
        write_record(path, "identity", self._settings, self._figures(), **more)

    def _figures(self) -> list[dict[str, Any]]:
        prompts_of_model: dict[str, int] = {}
        for result in self._results:
            seen = prompts_of_model.get(result.model, 0)
            prompts_of_model[result.model] = max(seen, result.num_prompts)
        total = [
            figure("identity.prompts", sum(prompts_of_model.values()), "prompts"),
            figure("identity.answers", sum(r.num_answers for r in self._results), "answers"),
            figure("identity.mismatches", sum(len(r.mismatches) for r in self._results), "answers"),
        ]
        for result in self._results:
            prefix, baseline = f"identity.{result.name}", result.baseline
            total += [
                figure(f"{prefix}.prompts", result.num_prompts, "prompts"),
                figure(f"{prefix}.answers", result.num_answers, "answers"),
                figure(f"{prefix}.mismatches", len(result.mismatches), "answers", baseline),
                figure(f"{prefix}.retractions", result.num_retractions, "retractions"),
                figure(f"{prefix}.elapsed", round(result.elapsed_s, 1), "s"),
            ]
        return total
