"""Check the language of README.md, docs/ and commit subjects, and the links between pages.

    python benchmarks/check_words.py [--code]

Prints one line per finding, and exits with 1 if there is any. --code: check docstrings and
comments, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from kvspec_testkit.words import (
    Finding,
    check_module,
    check_page,
    check_subject,
    link_targets,
)

ROOT = Path(__file__).resolve().parents[1]
# Only the subjects of later commits are checked.
FIRST_COMMIT = "0dec2ea5559e9c04673454f4a3c5449d87b27f4a"
SOURCES = ("sglang_kvspec", "kernels", "patches", "testkit", "benchmarks", "examples", "models")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", action="store_true", help="check docstrings and comments, too")
    args = parser.parse_args()
    found = [*page_findings(), *commit_findings()]
    if args.code:
        found += code_findings()
    for finding in found:
        print(finding)
    print(f"{len(found)} findings")
    return 1 if found else 0


def page_findings() -> list[Finding]:
    """Return the findings in README.md, docs/ and the READMEs of folders."""
    found = []
    for path in _tracked("*.md"):
        text = (ROOT / path).read_text(encoding="utf-8")
        found += check_page(str(path), text)
        found += [
            Finding(str(path), line, "no such file", target)
            for line, target in link_targets(text)
            if not (ROOT / path.parent / target).exists()
        ]
    return found


def code_findings() -> list[Finding]:
    """Return the findings in the docstrings and comments of the sources."""
    return [
        finding
        for path in _tracked(*(f"{folder}/**.py" for folder in SOURCES))
        for finding in check_module(str(path), (ROOT / path).read_text(encoding="utf-8"))
    ]


def commit_findings() -> list[Finding]:
    """Return the commit subjects that are too long. Return none if the clone lacks FIRST_COMMIT."""
    if _git("cat-file", "-t", FIRST_COMMIT).returncode:
        return []
    log = _git("log", "--no-merges", "--format=%h %s", f"{FIRST_COMMIT}..HEAD").stdout
    return [
        finding
        for line in log.splitlines()
        for finding in check_subject(*line.split(" ", maxsplit=1))
    ]


def _tracked(*patterns: str) -> list[Path]:
    listed = _git("ls-files", "--", *patterns).stdout.splitlines()
    return [Path(name) for name in listed if (ROOT / name).exists()]


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
