"""Tables of the page about SGLang's releases, drawn from the result of check_releases.py."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = ("yes", "changed", "moved", "no", "uncalled", "unfit")
_GROUPS = {"hook": "hooks", "import": "imports", "method": "methods"}


def release_tables(path: Path) -> dict[str, str]:
    """Return each table by its name, from a result file."""
    settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    groups = {f"releases_{name}": group_table(settings, kind) for kind, name in _GROUPS.items()}
    return {
        "releases_summary": summary_table(settings),
        **groups,
        "releases_misfits": misfit_table(settings["rows"]),
        "releases_changes": change_table(settings["changes"]),
    }


def summary_table(settings: Mapping[str, Any]) -> str:
    """Return how many symbols each release has."""
    lines = [_line("SGLang", "supported", *WORDS), _rule(2 + len(WORDS))]
    for release in settings["wheels"]:
        counts = Counter(row["cells"][release] for row in settings["rows"])
        supported = "yes" if release in settings["supported"] else "no"
        lines.append(_line(release, supported, *(str(counts[word]) for word in WORDS)))
    return "\n".join(lines)


def group_table(settings: Mapping[str, Any], kind: str) -> str:
    """Return one row a symbol and one column a release. For hooks, `uses` is the smallest number of
    places that use the symbol in a release which needs it."""
    releases = list(settings["wheels"])
    has_uses = kind == "hook"
    titles = ["SGLang symbol", "used by", *releases, *(["uses"] if has_uses else [])]
    lines = [_line(*titles), _rule(len(titles))]
    for row in settings["rows"]:
        if row["kind"] != kind:
            continue
        cells = [row["cells"][release] for release in releases]
        uses = [str(min(row.get("uses", {"": 0}).values()))] if has_uses else []
        lines.append(_line(_code(row["symbol"]), ", ".join(row["users"]), *cells, *uses))
    return "\n".join(lines)


def misfit_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return why symbols do not fit."""
    lines = [_line("SGLang symbol", "releases", "the symbol"), _rule(3)]
    for row in rows:
        by_reason: dict[str, list[str]] = {}
        for release, reason in row.get("reasons", {}).items():
            by_reason.setdefault(reason, []).append(release)
        for reason, releases in by_reason.items():
            lines.append(_line(_code(row["symbol"]), ", ".join(releases), reason))
    return "\n".join(lines)


def change_table(changes: Sequence[Mapping[str, str]]) -> str:
    """Return how arguments changed from one release to the next one."""
    lines = [_line("SGLang symbol", "release", "its arguments"), _rule(3)]
    lines += [_line(_code(each["symbol"]), each["release"], each["change"]) for each in changes]
    return "\n".join(lines)


def plain_table(settings: Mapping[str, Any]) -> str:
    """Return all rows for a terminal."""
    releases = list(settings["wheels"])
    width = max((len(row["symbol"]) for row in settings["rows"]), default=0)
    lines = [" ".join(["".ljust(width), *(release.ljust(8) for release in releases)])]
    for row in settings["rows"]:
        cells = (row["cells"][release].ljust(8) for release in releases)
        lines.append(" ".join([row["symbol"].ljust(width), *cells]))
    return "\n".join(line.rstrip() for line in lines)


def _code(symbol: str) -> str:
    places = symbol.split(" or ")
    return " or ".join(f"`{place.removeprefix('sglang.srt.')}`" for place in places)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(count: int) -> str:
    return f"|{'---|' * count}"
