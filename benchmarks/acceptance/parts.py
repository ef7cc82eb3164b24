"""Results of other scripts, from which a script puts a result together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Parts:
    """Reader of result files. sources: where, when and at which commit each was measured."""

    def __init__(self, folder: Path, commits: Sequence[str]) -> None:
        """commits: FILE=COMMIT of results from a machine without git."""
        self._folder = folder
        self._commits = dict(text.split("=") for text in commits)
        self.sources: dict[str, dict[str, Any]] = {}

    def read(self, name: str) -> dict[str, Any]:
        """Return a result. Raises KeyError if its commit is not known."""
        result: dict[str, Any] = json.loads((self._folder / name).read_text(encoding="utf-8"))
        source = {key: result.get(key) for key in ("commit", "date", "machine")}
        if source["commit"] in (None, "unknown"):
            source["commit"] = f"{self._commits[name]} (given)"
        self.sources[name] = source
        return result
