"""The environment in which a server breaks on purpose."""

from __future__ import annotations

from pathlib import Path

from harness.plugin_folders import python_path_with

_FOLDER = Path(__file__).resolve().parent.parent / "faults"


def fault_environment(**settings: object) -> tuple[tuple[str, str], ...]:
    """Variables of a ServerSpec, settings among them, with which it loads faults/ as a plugin."""
    given = [(name, str(value)) for name, value in settings.items()]
    return (*given, ("PYTHONPATH", python_path_with(_FOLDER)))


def fault_file_in(folder: Path, active: str = "none") -> Path:
    """A new KVSPEC_FAULT_FILE, which names the faults that are active."""
    path = folder / "active"
    path.write_text(active)
    return path
