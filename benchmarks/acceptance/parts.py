"""Results of other scripts, from which a script puts a result together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from acceptance.report import Figure

# Counts in reports of GPU servers' tests by target, and all of a report of `-m identity`.
COMPARED = re.compile(r"(?:lossless\..+|identity)\.(answers|mismatches)")


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


def answers_figures(rows: Iterable[Mapping[str, Any]], head: str) -> list[Figure]:
    """Return, as `head`.answers and `head`.mismatches, how many answers tests compared, and how
    many of them differ. rows: figures of reports."""
    sums = {"answers": 0, "mismatches": 0}
    for row in rows:
        if match := COMPARED.fullmatch(row["name"]):
            sums[match[1]] += row["value"]
    return [
        Figure(f"{head}.answers", sums["answers"], "answers"),
        Figure(f"{head}.mismatches", sums["mismatches"], "answers", None, 0),
    ]
