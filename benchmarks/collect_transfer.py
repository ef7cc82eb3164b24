"""Puts what two servers and benchmarks/bench_ttkt.py found beside what the transport did alone, in
transfer.json.

python benchmarks/collect_transfer.py benchmarks/results/ttkt.json IDENTITY.json [SPEED.json]

IDENTITY.json is what `pytest tests/sglang/test_disaggregation_in_full.py -m identity
--identity-report IDENTITY.json` wrote; SPEED.json, of bench_transfer.py --throughput on the machine
that the speeds are to be of, such as a GPU's host. Figures of an earlier collection are replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from collect_tiers import collect

TRANSFER = Path(__file__).parent / "results" / "transfer.json"
# What the names of collected figures begin with, once they are there.
KINDS = ("ttkt.", "transfer.mismatches", "transfer.identity.", "transfer.gbps_")
_PREFIX = "identity."
_MISMATCHES = "identity.mismatches"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, default=TRANSFER)
    args = parser.parse_args()
    found = {
        path.name: named(json.loads(path.read_text(encoding="utf-8"))) for path in args.results
    }
    transfer = json.loads(args.into.read_text(encoding="utf-8"))
    try:
        collected = collect(transfer, found, KINDS)
    except ValueError as error:
        parser.error(str(error))
    args.into.write_text(json.dumps(collected, indent=2) + "\n", encoding="utf-8")


def named(result: dict[str, Any]) -> dict[str, Any]:
    """A result whose figures of identity are those of transfers."""
    figures = [row | {"name": _named(row["name"])} for row in result["figures"]]
    return result | {"figures": figures}


def _named(name: str) -> str:
    if name == _MISMATCHES:
        return "transfer.mismatches"
    return f"transfer.{name}" if name.startswith(_PREFIX) else name


if __name__ == "__main__":
    main()
