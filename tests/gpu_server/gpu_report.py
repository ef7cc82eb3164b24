"""Figures of the tests of GPU servers, in the JSON form of benchmarks/results."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from acceptance.report import Figure, write_json

# Characters of the message of a failed test that are kept, from its end.
MOST_OF_A_REASON = 2000


class GpuReport:
    """Plug-in of pytest that counts the tests of this run and the answers that they compare, and
    writes --gpu-report after each test, as a lent machine may be taken away."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._begin = time.monotonic()
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        # Messages of failed tests, by name.
        self._reasons: dict[str, str] = {}
        # Answers compared, and those that differ, by target.
        self._answers: Counter[str] = Counter()
        self._mismatches: Counter[str] = Counter()

    def count_answers(self, target: str, num_answers: int, num_mismatches: int) -> None:
        """Count answers that were compared with those of a server without drafts."""
        self._answers[target] += num_answers
        self._mismatches[target] += num_mismatches

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = round(self._seconds.get(name, 0.0) + report.duration, 2)
        # A test counts as failed if its fixtures fail before it or after it.
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[name] = report.outcome
        if report.failed:
            self._reasons[name] = report.longreprtext[-MOST_OF_A_REASON:]

    def pytest_runtest_logfinish(self) -> None:
        option = self._config.getoption
        path: Path | None = option("--gpu-report")
        if path is None:
            return
        counts = {
            kind: sum(outcome == kind for outcome in self._outcomes.values())
            for kind in ("passed", "failed", "skipped")
        }
        figures = [
            *(Figure(f"gpu_tests.{kind}", count, "tests") for kind, count in counts.items()),
            Figure("gpu_tests.seconds", round(time.monotonic() - self._begin, 1), "s"),
        ]
        for target, count in self._answers.items():
            differ = self._mismatches[target]
            figures.append(Figure(f"lossless.{target}.answers", count, "answers"))
            figures.append(Figure(f"lossless.{target}.mismatches", differ, "answers", None, 0))
        settings = {
            "model": option("--gpu-model").name,
            "kernels": option("--gpu-kernels"),
            "prompts": option("--gpu-prompts"),
            "longest_prompt": option("--gpu-longest"),
            "new_tokens": option("--gpu-tokens"),
            "devices": torch.cuda.device_count(),
            "outcomes": self._outcomes,
            "seconds": self._seconds,
            "reasons": self._reasons,
        }
        on_gpu = torch.cuda.is_available() and not option("--cpu")
        device = torch.device("cuda" if on_gpu else "cpu")
        commit = option("--gpu-commit")
        write_json(path, "gpu_tests", device, settings, figures, commit=commit)
