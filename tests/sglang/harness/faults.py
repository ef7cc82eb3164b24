"""The environment in which a server breaks on purpose."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "faults"


def fault_environment(**settings: object) -> tuple[tuple[str, str], ...]:
    """Variables of a ServerSpec, settings among them, with which it loads faults/ as a plugin."""
    paths = [str(_FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    given = [(name, str(value)) for name, value in settings.items()]
    return (*given, ("PYTHONPATH", os.pathsep.join(filter(None, paths))))


def fault_file_in(folder: Path, active: str = "none") -> Path:
    """A new KVSPEC_FAULT_FILE, which names the faults that are active."""
    path = folder / "active"
    path.write_text(active)
    return path
