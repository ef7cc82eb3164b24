"""Environment of a server that breaks on purpose."""

from __future__ import annotations

from pathlib import Path

from harness.plugin_folders import python_path_with

_FOLDER = Path(__file__).resolve().parent.parent / "faults"


def fault_environment(**settings: object) -> tuple[tuple[str, str], ...]:
    """Return the environment of a ServerSpec that loads faults/ as a plugin, with these
    settings."""
    given = [(name, str(value)) for name, value in settings.items()]
    return (*given, ("PYTHONPATH", python_path_with(_FOLDER)))


def fault_file_in(folder: Path, active: str = "none") -> Path:
    """Create a KVSPEC_FAULT_FILE, which names the active faults."""
    path = folder / "active"
    path.write_text(active)
    return path
