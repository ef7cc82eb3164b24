"""Collect results of servers into tiers.json, beside the planner's results in simulated time.

python benchmarks/collect_tiers.py benchmarks/results/soak.json [OTHER.json ...]

Figures of an earlier collection are replaced. `settings.collected` names the file of each kind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIERS = Path(__file__).parent / "results" / "tiers.json"
# Prefixes of the names of collected figures.
KINDS = ("soak.", "fetch.", "pressure.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, default=TIERS)
    args = parser.parse_args()
    found = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in args.results}
    tiers = json.loads(args.into.read_text(encoding="utf-8"))
    try:
        collected = collect(tiers, found)
    except ValueError as error:
        parser.error(str(error))
    args.into.write_text(json.dumps(collected, indent=2) + "\n", encoding="utf-8")


def collect(
    tiers: dict[str, Any], found: dict[str, dict[str, Any]], kinds: Sequence[str] = KINDS
) -> dict[str, Any]:
    """Return `tiers` with the figures of `found`, which replace figures of the same kind. found:
    results by file name. Raises ValueError for a result without a figure to collect."""

    def kind_of(name: str) -> str:
        return next((kind for kind in kinds if name.startswith(kind)), "")

    figures = list(tiers["figures"])
    sources = dict(tiers["settings"].get("collected", {}))
    for name, result in found.items():
        new = [row for row in result["figures"] if kind_of(row["name"])]
        if not new:
            raise ValueError(f"{name} has no figure whose name begins with {' or '.join(kinds)}")
        collected = {kind_of(row["name"]) for row in new}
        figures = [row for row in figures if kind_of(row["name"]) not in collected]
        figures += new
        for kind in collected:
            sources[kind.rstrip("._")] = {
                "file": name,
                **{key: result[key] for key in ("commit", "date", "machine")},
            }
    return tiers | {"figures": figures, "settings": tiers["settings"] | {"collected": sources}}


if __name__ == "__main__":
    main()
