"""The table of all symbols and releases, as data that is written to a result file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from releases.comparison import BREAKS, REFERENCE, Cell, Found, change, judge
from releases.needs import Need, digest
from sglang_kvspec.core.sglang_releases import SUPPORTED


def make_settings(
    needs: Sequence[Need],
    found: Mapping[str, Sequence[Found | None]],
    wheels: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Return the table. found: what each release has for each need, oldest release first; with the
    reference. wheels: file and hash of each."""
    rows, breaks, changes = [], [], []
    for index, need in enumerate(needs):
        looked_up = {release: found[release][index] for release in found}
        cells = {
            release: judge(need, release, each, looked_up[REFERENCE])
            for release, each in looked_up.items()
        }
        if all(cell.word == "-" for cell in cells.values()):
            continue
        rows.append(_row(need, cells))
        breaks += [
            {"symbol": _symbol(need), "release": release, "reason": cell.reason}
            for release, cell in cells.items()
            if cell.word in BREAKS and release in SUPPORTED
        ]
        changes += _changes(need, looked_up, cells)
    return {
        "needs": digest(needs),
        "reference": REFERENCE,
        "supported": list(SUPPORTED),
        "wheels": {release: dict(wheels[release]) for release in found},
        "breaks": breaks,
        "changes": changes,
        "rows": rows,
    }


def _symbol(need: Need) -> str:
    return " or ".join(need.places)


def _row(need: Need, cells: Mapping[str, Cell]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": need.kind,
        "symbol": _symbol(need),
        "users": list(need.users),
        "cells": {release: cell.word for release, cell in cells.items()},
    }
    if reasons := {release: cell.reason for release, cell in cells.items() if cell.reason}:
        row["reasons"] = reasons
    counted = {release: cell.uses for release, cell in cells.items() if cell.uses is not None}
    return row | {"uses": counted} if counted else row


def _changes(
    need: Need, looked_up: Mapping[str, Found | None], cells: Mapping[str, Cell]
) -> list[dict[str, str]]:
    """Return how the arguments of a symbol changed from each release to the next one."""
    releases = list(looked_up)
    return [
        {"symbol": _symbol(need), "release": new, "change": text}
        for old, new in pairwise(releases)
        if cells[new].word != "-" and (text := change(looked_up[old], looked_up[new]))
    ]


def complaints(settings: Mapping[str, Any], needs: Sequence[Need]) -> list[str]:
    """Return why a table does not show that the present sources fit the supported releases."""
    if settings["needs"] != digest(needs):
        return ["the table was made for other symbols or releases: run `make releases`"]
    return [
        f"SGLang {each['release']}: {each['symbol']} {each['reason']}"
        for each in settings["breaks"]
    ]
