"""Figures with spread, as JSON and as a curve."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# Two-sided 95% quantile of the normal distribution: prompts are hundreds of independent draws.
Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. spread: half width of its uncertainty, as the benchmark defines it. baseline: the
    value to compare it with."""

    name: str
    value: float
    unit: str
    spread: float | None = None
    baseline: float | None = None


def figure_of(row: Mapping[str, Any], name: str) -> Figure:
    """Return a figure of a result file under another name."""
    return Figure(name, row["value"], row["unit"], row["spread"], row["baseline"])


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over prompts and the half width of its 95% interval."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, samples: torch.Tensor) -> Estimate:
        values = samples.double()
        if len(values) < 2:
            return cls(values.mean().item(), float("inf"))
        return cls(values.mean().item(), Z95 * values.std().item() / len(values) ** 0.5)

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.half_width:.2f}"


def write_json(
    path: Path,
    bench: str,
    device: torch.device,
    settings: dict[str, Any],
    figures: Sequence[Figure],
    *,
    machine: str | None = None,
    commit: str | None = None,
    measured_with: Mapping[str, str] | None = None,
) -> None:
    """Write the record of one run to `path`, and create its folder.

    machine, commit, measured_with (versions): where and with what the run was measured, if not by
    this process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "bench": bench,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or current_commit(path),
        "machine": machine or _machine(device),
        "versions": dict(versions() if measured_with is None else measured_with),
        "settings": settings,
        "figures": [asdict(figure) for figure in figures],
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def draw_curves(
    path: Path, lengths: Sequence[int], curves: dict[str, Sequence[Estimate]], title: str
) -> None:
    """Draw accept length (mean) against draft length to a PNG, one line per entry of `curves`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.4), dpi=150)
    axes.plot(lengths, lengths, color="0.7", linestyle="--", label="every token accepted")
    for name, estimates in curves.items():
        means = [e.mean for e in estimates]
        axes.plot(lengths, means, marker="o", markersize=3, label=name)
        low = [e.mean - e.half_width for e in estimates]
        high = [e.mean + e.half_width for e in estimates]
        axes.fill_between(lengths, low, high, alpha=0.15)
    axes.set(xlabel="draft length (tokens)", ylabel="mean accept length (tokens)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)"


def current_commit(result: Path | None = None) -> str:
    """Return the commit of this checkout, with -dirty behind it if files other than `result`, which
    a script may write several times, differ from the commit.

    Return "unknown" without git.
    """
    folder = Path(__file__).parent
    try:
        head, root = _git(folder, "rev-parse", "HEAD"), _git(folder, "rev-parse", "--show-toplevel")
        others = [":/"]
        if result is not None and result.resolve().is_relative_to(root):
            others.append(f":(top,exclude){result.resolve().relative_to(root)}")
        return f"{head}-dirty" if _git(folder, "status", "--porcelain", "--", *others) else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=20
    )
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and the packages that prompts depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    # Prompts are cut from the sources of networkx and aiohttp.
    for package in ("networkx", "aiohttp", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
