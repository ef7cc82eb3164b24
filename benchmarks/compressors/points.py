"""Acceptance and bytes of the methods of a result, and the methods that no other one beats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressors.names import ALL_TOKENS, BEFORE_ROTARY, PLAIN, Method
from sglang_kvspec.planning.compressor_choice import LEAST_ACCEPTED

# Figures of a method that results of several runs keep.
WHATS = (
    "accepted",
    "vs_dense4",
    "read",
    "bytes_vs_dense4",
    "tokens_vs_plain.hosted",
    "tokens_vs_plain.freed",
    "tokens_per_s",
)


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of one method by name, those of WHATS, as rows of a result file."""

    method: Method
    rows: Mapping[str, Mapping[str, Any]]

    def __getitem__(self, what: str) -> float:
        return float(self.rows[what]["value"])


def points_of(rows: Iterable[Mapping[str, Any]], prefix: str) -> list[Point]:
    """Return the methods among figures that are named `prefix` + METHOD.WHAT, in order."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        for what in WHATS:
            name = row["name"].removesuffix(f".{what}")
            if row["name"].startswith(prefix) and name != row["name"]:
                found.setdefault(name.removeprefix(prefix), {})[what] = row
    return [
        Point(Method.of(name), by_what)
        for name, by_what in found.items()
        # Other figures of a place end like these.
        if len(by_what) == len(WHATS)
    ]


def read_places(path: Path) -> dict[str, list[Point]]:
    """Return the methods of each place of compressors.json, by title."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {
        title_of(place): points_of(result["figures"], f"compressors.{name}.")
        for name, place in result["settings"]["places"].items()
    }


def title_of(place: Mapping[str, Any]) -> str:
    """Return the model, the length of prompts and the kind of a place."""
    title = f"{place['model']}, {place['prompt_len']:,} tokens"
    if place["text"] != "code":
        title += f", {place['text'].capitalize()}"
    return title if place["by"] == "pages" else f"{title}, by {place['by']}"


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats in bytes and acceptance, from the fewest bytes
    on."""
    best, accepted = [], -1.0
    for point in sorted(points, key=lambda p: (p["bytes_vs_dense4"], -p["accepted"])):
        if point["accepted"] > accepted:
            best.append(point)
            accepted = point["accepted"]
    return best


def cheapest(points: Sequence[Point]) -> Point | None:
    """Return the point with the fewest bytes that keeps LEAST_ACCEPTED, None where none does."""
    kept = [point for point in points if point["vs_dense4"] >= LEAST_ACCEPTED]
    return min(kept, key=lambda p: p["bytes_vs_dense4"], default=None)


def cheapest_everywhere(places: Iterable[Sequence[Point]]) -> tuple[Method, float] | None:
    """Return the method that keeps LEAST_ACCEPTED at every place and whose most bytes are fewest,
    and these bytes; None where no method does."""
    bytes_by_place = [
        {p.method: p["bytes_vs_dense4"] for p in points if p["vs_dense4"] >= LEAST_ACCEPTED}
        for points in places
    ]
    shared = set.intersection(*(set(each) for each in bytes_by_place))
    worst = {method: max(each[method] for each in bytes_by_place) for method in shared}
    # Names order methods of equal bytes, as sets have no order.
    return min(worst.items(), key=lambda item: (item[1], item[0].name), default=None)


def names_of(points: Iterable[Point]) -> set[str]:
    """Return the scorers and the codecs of some methods, without numbers of bits, before or behind
    the rotary embedding. Scorers that differ in options count once a label."""
    found = set()
    for point in points:
        found.add(point.method.scorer)
        codec = point.method.anchors.rpartition("_")[0] or point.method.anchors
        found.add(codec.removesuffix(f"_{BEFORE_ROTARY}"))
    return found - {ALL_TOKENS, PLAIN}


def accepted_alone(points: Iterable[Point], codecs: Sequence[str]) -> Point | None:
    """Return the point of the codecs, labels of anchors, that accepts most if drafts read all of
    its anchors, None where none was run."""
    alone = [p for p in points if p.method.scorer == ALL_TOKENS and p.method.anchors in codecs]
    return max(alone, key=lambda p: p["accepted"], default=None)
