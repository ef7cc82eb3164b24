"""Results of bench_gpu_identity.py on equal answers, to report beside speed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acceptance.report import Figure

NAME = "identity_h200.json"
PREFIX = "identity.gpu."


@dataclass(frozen=True, slots=True)
class Identity:
    """Result of bench_gpu_identity.py. figures: figures whose names begin with PREFIX. settings:
    what was compared, at which commit and in which file."""

    machine: str
    figures: list[Figure]
    settings: dict[str, Any]


def read_identity(path: Path) -> Identity:
    """Read a result of bench_gpu_identity.py. Raises ValueError if it has no such figures."""
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in result["figures"] if row["name"].startswith(PREFIX)]
    if not rows:
        raise ValueError(f"{path} has no figures whose names begin with {PREFIX}")
    measured_at = f"{result['commit']} {result['date']}"
    settings = {"file": path.name, "measured_at": measured_at, **result["settings"]}
    return Identity(result["machine"], [Figure(**row) for row in rows], settings)


def find_identity(given: Path | None, out: Path, machine: str) -> Identity | None:
    """Return the result that --identity names, or else NAME beside `out`.

    given: the value of --identity. Return None if it is None and `out` has no such file beside it.
    Raises ValueError if the result is from another machine than `machine`, FileNotFoundError if
    `given` does not exist.
    """
    path = given or out.with_name(NAME)
    if given is None and not path.exists():
        return None
    identity = read_identity(path)
    if identity.machine != machine:
        raise ValueError(
            f"{path} was measured on {identity.machine}, the points on {machine}: give a result of "
            "the same machine with --identity, or another folder with --out"
        )
    return identity
