"""Environment of a server: PYTHONPATH with this checkout, its plug-ins and acceptance replay."""

from __future__ import annotations

import os
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPLAY = Path(__file__).resolve().parent / "replay"
_PLUGIN_GROUP = "sglang.srt.plugins"


def server_environment(scratch: Path, curve: Path | None) -> dict[str, str]:
    """Return variables to add to the caller's environment. curve: file for the replay plug-in, None
    for no replay.

    If this checkout is not installed, its entry points are written below `scratch`.
    """
    folders = [ROOT, ROOT / "kernels", ROOT / "patches"]
    if not any(found.name == "kvspec" for found in entry_points(group=_PLUGIN_GROUP)):
        folders.append(_write_entry_points(scratch / "entry_points"))
    variables = {}
    if curve is not None:
        folders.append(REPLAY)
        variables["KVSPEC_REPLAY_CURVE"] = str(curve)
    paths = [str(folder) for folder in folders]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return {"PYTHONPATH": os.pathsep.join(paths), **variables}


def _write_entry_points(folder: Path) -> Path:
    """Write a distribution that has only metadata, from pyproject.toml. Return `folder`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = folder / "sglang_kvspec-0.0.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.0.0\n", encoding="utf-8"
    )
    return folder
