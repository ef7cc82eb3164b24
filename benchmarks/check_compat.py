"""Test sglang-kvspec on every SGLang that it supports, each in an environment of its own.

Writes benchmarks/results/compat_releases.json. An environment takes 9 GB and is removed after its
release, unless --keep. Servers run on the CPU.

usage: python benchmarks/check_compat.py [RELEASE ...] [--all] [--jobs N] [--keep] [--resume]
                                         [--out PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from acceptance.report import Figure, current_commit, write_json
from rich.console import Console
from rich.table import Table

from sglang_kvspec.core.sglang_releases import SUPPORTED, parse_version

ROOT = Path(__file__).resolve().parents[1]
# Hooks and adapters, start-up, an engine in a program, everything that a user does, answers
# compared with plain SGLang at both targets, two servers, the prefix server, ranks.
SAMPLE = (
    "tests/unit/adapters",
    "tests/unit/patches",
    "tests/unit/test_doctor.py",
    *(
        f"tests/sglang/test_{name}.py"
        for name in (
            *("start_errors", "gpu_flags", "doctor", "engine", "features", "identity"),
            *("disaggregation", "prefix_server", "tensor_parallel"),
        )
    ),
)
EVERYTHING = (*SAMPLE[:3], "tests/sglang")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one release. failed: names of tests. answers, mismatches: of the identity tests."""

    release: str
    passed: int
    failed: tuple[str, ...]
    skipped: int
    answers: int
    mismatches: int
    seconds: float
    versions: dict[str, str]

    @property
    def is_good(self) -> bool:
        return bool(self.passed) and not self.failed and not self.mismatches


def main() -> int:
    args = parse_arguments()
    tests = EVERYTHING if args.all else SAMPLE
    outcomes = read_outcomes(args.out, tests) if args.resume else []
    if args.resume and not outcomes:
        Console().print(
            f"{args.out} has no releases at this clean commit: all are run", markup=False
        )
    done = {outcome.release for outcome in outcomes}
    releases = [each for each in args.releases if each not in done]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(run_release, each, tests, keep=args.keep) for each in releases]
        for run in as_completed(runs):
            outcomes.append(run.result())
            outcomes.sort(key=lambda outcome: parse_version(outcome.release))
            write_results(args.out, outcomes, everything=args.all)
            print_results(outcomes)
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("releases", nargs="*", default=SUPPORTED, metavar="RELEASE")
    add("--all", action="store_true", help="all tests on a server, instead of a sample of files")
    # A server counts memory that other jobs take during its start as its own.
    add("--jobs", type=int, default=1,
        help="releases at the same time (default: %(default)s); more may fail tests of ranks "
        "where memory is scarce")  # fmt: skip
    add("--keep", action="store_true", help="leave the environments in .kvspec/compat")
    add("--resume", action="store_true", help="leave out releases that --out has at this commit")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "compat_releases.json")
    return parser.parse_args()


def run_release(release: str, tests: Sequence[str], *, keep: bool) -> Outcome:
    """Make the environment of a release, run tests in it, and remove it. Raises CalledProcessError
    if the environment cannot be made."""
    venv = ROOT / ".kvspec" / "compat" / release
    subprocess.run(["make", "env", f"SGLANG={release}", f"VENV={venv}"], cwd=ROOT, check=True)
    try:
        return run_tests(release, venv / "bin" / "python", tests)
    finally:
        if not keep:
            shutil.rmtree(venv)


def run_tests(release: str, python: Path, tests: Sequence[str]) -> Outcome:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results, identity = Path(folder, "tests.xml"), Path(folder, "identity.json")
        # Thread pools of several server processes on few cores slow one another down.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        options = (f"--junitxml={results}", f"--identity-report={identity}")
        command = [python, "-m", "pytest", "-q", *tests, *options]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        passed, failed, skipped = read_tests(results)
        answers, mismatches = read_identity(identity)
    seconds = time.monotonic() - began
    return Outcome(
        release, passed, failed, skipped, answers, mismatches, seconds, versions_of(python)
    )


def read_tests(path: Path) -> tuple[int, tuple[str, ...], int]:
    """Return how many tests passed, the names of those that failed, and how many were skipped."""
    passed, failed, skipped = 0, [], 0
    for case in ElementTree.parse(path).iter("testcase"):
        found = {child.tag for child in case}
        if found & {"failure", "error"}:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif "skipped" in found:
            skipped += 1
        else:
            passed += 1
    return passed, tuple(failed), skipped


def read_identity(path: Path) -> tuple[int, int]:
    """Return the answers and the mismatches of an identity report; none where no test wrote one."""
    if not path.exists():
        return 0, 0
    figures = {each["name"]: each["value"] for each in json.loads(path.read_text())["figures"]}
    return figures["identity.answers"], figures["identity.mismatches"]


def read_outcomes(path: Path, tests: Sequence[str]) -> list[Outcome]:
    """Return the outcomes of a result; none if it is missing, of other tests or another commit."""
    if not path.exists():
        return []
    result, commit = json.loads(path.read_text()), current_commit(path)
    is_other = result["commit"] != commit or result["settings"].get("tests") != list(tests)
    # Two trees with changes may differ from each other, too.
    if is_other or commit.endswith("-dirty"):
        return []
    return outcomes_of(result)


def outcomes_of(result: dict[str, Any]) -> list[Outcome]:
    """Return the outcomes in a result, by release."""
    raw = result["settings"]["raw"]
    return [Outcome(**{**each, "failed": tuple(each["failed"])}) for each in raw]


def versions_of(python: Path) -> dict[str, str]:
    names = ("sglang", "torch", "transformers", "flashinfer_python", "sglang-kernel", "triton")
    code = (
        "import json, platform; from importlib import metadata\n"
        f"found = {{d.metadata['Name']: d.version for d in metadata.distributions()}}\n"
        f"names = {names!r}\n"
        "print(json.dumps({'python': platform.python_version()}"
        " | {n: found[n] for n in names if n in found}))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def write_results(path: Path, outcomes: Sequence[Outcome], *, everything: bool) -> None:
    settings = {
        "tests": list(EVERYTHING if everything else SAMPLE),
        "raw": [asdict(outcome) for outcome in outcomes],
    }
    write_json(path, "compat", torch.device("cpu"), settings, figures_of(outcomes))


def figures_of(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Return the figures of all releases together, and of each."""
    figures = [
        Figure("compat.releases", sum(o.is_good for o in outcomes), "releases"),
        Figure("compat.failed", sum(len(o.failed) for o in outcomes), "tests", baseline=0),
        Figure("compat.mismatches", sum(o.mismatches for o in outcomes), "answers", baseline=0),
    ]
    for outcome in outcomes:
        label = f"compat.{outcome.release}"
        figures += [
            Figure(f"{label}.passed", outcome.passed, "tests"),
            Figure(f"{label}.failed", len(outcome.failed), "tests", baseline=0),
            Figure(f"{label}.answers", outcome.answers, "answers"),
            Figure(f"{label}.mismatches", outcome.mismatches, "answers", baseline=0),
            Figure(f"{label}.seconds", outcome.seconds, "seconds"),
        ]
    return figures


def print_results(outcomes: Sequence[Outcome]) -> None:
    table = Table(title="sglang-kvspec by SGLang release, on a CPU")
    for heading in ("SGLang", "torch", "passed", "failed", "answers", "mismatches", "seconds"):
        table.add_column(heading, justify="right")
    for o in outcomes:
        counts = (o.passed, len(o.failed), o.answers, o.mismatches, round(o.seconds))
        table.add_row(o.release, o.versions.get("torch", "-"), *map(str, counts))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
