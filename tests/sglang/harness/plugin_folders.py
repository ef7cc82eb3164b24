"""Folders of plug-ins that a server finds as if they were installed."""

from __future__ import annotations

import os
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"


def python_path_with(folder: Path) -> str:
    """Return the PYTHONPATH of this process behind `folder`, whose .dist-info names its entry
    points."""
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(filter(None, paths))
