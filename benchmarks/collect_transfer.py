"""Collect results of two servers and of bench_ttkt.py into transfer.json, beside the transport's.

python benchmarks/collect_transfer.py benchmarks/results/ttkt.json IDENTITY.json [SPEED.json]

IDENTITY.json is the output of `pytest tests/sglang/test_disaggregation_in_full.py -m identity
--identity-report IDENTITY.json`. SPEED.json is the output of bench_transfer.py --throughput on the
machine whose speed counts, such as a GPU's host. Figures of an earlier collection are replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from collect_tiers import collect

TRANSFER = Path(__file__).parent / "results" / "transfer.json"
# Prefixes of the names of collected figures in transfer.json.
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
    """Return `result` with its identity figures renamed to figures of transfers."""
    figures = [row | {"name": _named(row["name"])} for row in result["figures"]]
    return result | {"figures": figures}


def _named(name: str) -> str:
    if name == _MISMATCHES:
        return "transfer.mismatches"
    return f"transfer.{name}" if name.startswith(_PREFIX) else name


if __name__ == "__main__":
    main()
