"""Merges the results of identity runs that shared the matrix into one file.

python benchmarks/merge_identity.py PART.json ... --out benchmarks/results/identity.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOTALS = ("identity.prompts", "identity.answers", "identity.mismatches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--commit", help="of the tree that ran, where it was no git checkout")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    merged = merge([json.loads(path.read_text()) for path in args.parts])
    if args.commit:
        merged["commit"] = args.commit
    args.out.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of all parts. Raises ValueError when they are not of one commit and machine."""
    for key in ("commit", "versions", "settings"):
        if any(part[key] != parts[0][key] for part in parts):
            raise ValueError(f"the parts differ in their {key}")
    values = [{f["name"]: f["value"] for f in part["figures"]} for part in parts]
    prompts: dict[str, int] = {}
    for numbers in values:
        # Each part ran one model, so its total is that model's.
        models = {name.split(".")[1] for name in numbers if name not in TOTALS}
        (model,) = models
        prompts[model] = max(prompts.get(model, 0), numbers["identity.prompts"])
    totals = {
        "identity.prompts": sum(prompts.values()),
        "identity.answers": sum(numbers["identity.answers"] for numbers in values),
        "identity.mismatches": sum(numbers["identity.mismatches"] for numbers in values),
    }
    by_name = {f["name"]: f for part in parts for f in part["figures"] if f["name"] not in TOTALS}
    first = {f["name"]: f for f in parts[0]["figures"]}
    figures = [first[name] | {"value": value} for name, value in totals.items()]
    mismatches = [entry for part in parts for entry in part["mismatches"]]
    return parts[0] | {
        "date": max(part["date"] for part in parts),
        "figures": figures + [by_name[name] for name in sorted(by_name)],
        "mismatches": mismatches,
    }


if __name__ == "__main__":
    main()
