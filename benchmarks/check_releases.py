"""Compare every name of SGLang that KVSpec uses with the wheels of SGLang, without installing one.

Writes benchmarks/results/releases.json and the tables of docs/reference/sglang-releases.md. Fails
if a supported release lacks a symbol, never calls a hooked function, or calls a function of ours
with arguments that it does not take. Wheels stay in .kvspec/wheels.

usage: python benchmarks/check_releases.py [RELEASE ...] [--cached | --cached-if-offline]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from acceptance.report import Figure, write_json
from releases.comparison import look_up
from releases.needs import Need, all_needs
from releases.record import complaints, make_settings
from releases.tables import plain_table, release_tables
from releases.wheels import DownloadError, get_wheel

from kvspec_patches.hooks import HOOKS
from sglang_kvspec.core.sglang_releases import SUPPORTED, parse_version

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "releases.json"
PAGE = ROOT / "docs" / "reference" / "sglang-releases.md"
# Releases that are not supported. Their columns show what a move there would take.
OTHERS: tuple[str, ...] = ()


def main() -> int:
    args = parse_arguments()
    needs = all_needs(HOOKS, ROOT)
    if args.cached:
        return check_cached(args.out, needs)
    releases = sorted({*SUPPORTED, *OTHERS, *args.releases}, key=parse_version)
    try:
        settings = compare(needs, releases, args.wheels)
    except DownloadError as error:
        print(error, file=sys.stderr)
        if not args.cached_if_offline:
            return 1
        print(f"using the cached table {args.out} instead", file=sys.stderr)
        return check_cached(args.out, needs)
    write(args.out, settings)
    if args.page.exists():
        fill_page(args.page, args.out)
    print(plain_table(settings))
    return report(complaints(settings, needs))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("releases", nargs="*", metavar="RELEASE", help="more releases, besides the usual ones")
    add("--wheels", type=Path, default=ROOT / ".kvspec" / "wheels", help="folder of the wheels")
    add("--out", type=Path, default=RESULT)
    add("--page", type=Path, default=PAGE)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--cached", action="store_true", help="check the table of the last run, download nothing"
    )
    source.add_argument(
        "--cached-if-offline", action="store_true", help="the same, if a download fails"
    )
    return parser.parse_args()


def compare(needs: Sequence[Need], releases: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the table of all needs and releases. Raises DownloadError."""
    # All wheels first, so that a failing download costs no comparison.
    wheels = {release: get_wheel(release, folder) for release in releases}
    found = {release: look_up(needs, wheel) for release, wheel in wheels.items()}
    files = {r: {"file": w.path.name, "sha256": w.sha256} for r, w in wheels.items()}
    return make_settings(needs, found, files)


def write(path: Path, settings: dict[str, Any]) -> None:
    figures = [
        Figure("compat.static_breaks", len(settings["breaks"]), "breaks", baseline=0),
        Figure("compat.static_symbols", len(settings["rows"]), "symbols"),
    ]
    versions = {"python": platform.python_version(), "sglang": ", ".join(settings["wheels"])}
    write_json(
        path,
        "check_releases",
        torch.device("cpu"),
        settings,
        figures,
        machine="any: sources are read, nothing runs",
        measured_with=versions,
    )


def fill_page(page: Path, result: Path) -> None:
    # Late, since the other tables of the pages need the whole product.
    from doc_tables import filled

    text = filled(page.read_text(encoding="utf-8"), release_tables(result))
    page.write_text(text, encoding="utf-8")


def check_cached(path: Path, needs: Sequence[Need]) -> int:
    """Return 0 if the table of an earlier run is of these needs and has no break."""
    if not path.exists():
        return report([f"there is no cached table {path}: run `make releases`"])
    record = json.loads(path.read_text(encoding="utf-8"))
    return report(complaints(record["settings"], needs))


def report(problems: Sequence[str]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"SGLang {', '.join(SUPPORTED)}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
