"""Merge the reports of identity runs, each of which ran a part of the matrix, into one file.

python benchmarks/merge_identity.py PART.json ... --out benchmarks/results/identity.json

Runs can divide the models, codecs and scenarios, and with --identity-shard the prompts of a
scenario. With --ties, answers that part at a tie which check_ties.py measured count as near ties,
and all others as mismatches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

TOTALS = ("identity.prompts", "identity.answers", "identity.mismatches")
ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("sglang_kvspec", "kernels", "patches")
NO_CHECKOUT = "not a git checkout"
WHOLE = "1/1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--commit", help="commit of the parts that ran outside a git checkout")
    parser.add_argument("--ties", type=Path, help="result of check_ties.py for these parts")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in args.parts]
    for part in parts:
        if args.commit and part["commit"] == NO_CHECKOUT:
            part["commit"] = args.commit
    merged = merge(parts)
    if args.ties is not None:
        ties = json.loads(args.ties.read_text(encoding="utf-8"))
        check_product(merged["commit"], ties["commit"])
        merged = with_ties(merged, ties["settings"]["raw"])
    args.out.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one report of all parts, in which the shards of a scenario are added up.

    Raises ValueError if the parts differ in commit or settings, or if a scenario does not have each
    of its shards once.
    """
    for key in ("commit", "settings"):
        if any(part[key] != parts[0][key] for part in parts):
            raise ValueError(f"the parts have different values of {key!r}: merge them separately")
    _check_shards(parts)
    rows: dict[str, dict[str, Any]] = {}
    for figure in (figure for part in parts for figure in part["figures"]):
        name = figure["name"]
        if name not in TOTALS:
            value = figure["value"] + (rows[name]["value"] if name in rows else 0)
            rows[name] = figure | {"value": round(value, 1)}
    first = {figure["name"]: figure for figure in parts[0]["figures"]}
    return parts[0] | {
        "date": max(part["date"] for part in parts),
        "machine": _one_or_all(part["machine"] for part in parts),
        "versions": {
            name: _one_or_all(part["versions"][name] for part in parts)
            for name in parts[0]["versions"]
        },
        "shard": WHOLE,
        "figures": [first[name] | {"value": value} for name, value in _totals(rows).items()]
        + [rows[name] for name in sorted(rows)],
        "mismatches": [entry for part in parts for entry in part["mismatches"]],
    }


def check_product(commit: str, other: str) -> None:
    """Raise ValueError if the code of the product differs between two commits."""
    command = ["git", "diff", "--quiet", commit, other, "--", *PRODUCT, ":(exclude)*.md"]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise ValueError(f"the product of {other} is not that of {commit}")


def with_ties(merged: dict[str, Any], ties: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a report whose mismatches do not include answers that part at a measured tie."""
    known = {(t["model"], t["setting"], t["task"], t["position"], *t["tokens"]): t for t in ties}
    at_ties, others = [], []
    for entry in merged["mismatches"]:
        place = (*entry["in"].split(".")[:2], entry["task"], entry["position"])
        tie = known.get((*place, entry["expected"][0], entry["actual"][0]))
        if tie is not None and tie["is_tie"]:
            at_ties.append(entry | {"gap": tie["gap"], "noise": tie["noise"]})
        else:
            others.append(entry)
    figures = [
        figure | {"value": len(others)} if figure["name"] == "identity.mismatches" else figure
        for figure in merged["figures"]
    ]
    shown = {"unit": "answers", "spread": None, "baseline": None}
    figures.insert(len(TOTALS), {"name": "identity.near_ties", "value": len(at_ties)} | shown)
    return merged | {"figures": figures, "mismatches": others, "near_ties": at_ties}


def _check_shards(parts: Sequence[dict[str, Any]]) -> None:
    shards_of: dict[str, list[str]] = defaultdict(list)
    for part in parts:
        for name in {_split(figure["name"])[0] for figure in part["figures"]} - {"identity"}:
            shards_of[name].append(part["shard"])
    for name, shards in sorted(shards_of.items()):
        count = int(shards[0].partition("/")[2])
        if sorted(shards) != sorted(f"{index}/{count}" for index in range(1, count + 1)):
            raise ValueError(
                f"{name} has the shards {', '.join(sorted(shards))}: give each of 1/{count} to "
                f"{count}/{count} once"
            )


def _totals(rows: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return the totals. Every scenario of a model sends the same prompts, so prompts are counted
    once per model."""
    prompts_of_model: dict[str, int] = defaultdict(int)
    sums: dict[str, int] = defaultdict(int)
    for name, row in rows.items():
        scenario, kind = _split(name)
        sums[kind] += row["value"]
        if kind == "prompts":
            model = scenario.split(".")[1]
            prompts_of_model[model] = max(prompts_of_model[model], row["value"])
    values = (sum(prompts_of_model.values()), sums["answers"], sums["mismatches"])
    return dict(zip(TOTALS, values, strict=True))


def _split(name: str) -> tuple[str, str]:
    """Split identity.MODEL.SETTING.SCENARIO.KIND into the name without its kind, and the kind."""
    scenario, _, kind = name.rpartition(".")
    return scenario, kind


def _one_or_all(values: Iterable[Any]) -> Any:
    """Return the value that all parts share, or else a list of the different values."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different[0] if len(different) == 1 else different


if __name__ == "__main__":
    main()
