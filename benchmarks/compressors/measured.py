"""Figures of the study for the package: sglang_kvspec/planning/measured_compressors.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from compressors.names import BEFORE_ROTARY, DENSE4_LABEL, PLAIN, Method
from compressors.points import Point
from sglang_kvspec.core.seams import SCORERS
from sglang_kvspec.planning.compressor_choice import ALL_TOKENS, Measured

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "sglang_kvspec" / "planning" / "measured_compressors.py"
FRACTION_DIGITS = {"accepted": 2, "vs_dense4": 3, "bytes_vs_dense4": 3}


def measured_of(places: Mapping[str, list[Point]]) -> list[Measured]:
    """Return scorers with their default options over anchors of 4 bits, and codecs that serve,
    alone, that were measured at every place."""
    by_method: dict[Method, list[Point]] = {}
    for points in places.values():
        for point in points:
            by_method.setdefault(point.method, []).append(point)
    return [
        _measured(method, points)
        for method, points in by_method.items()
        if len(points) == len(places) and _is_plain(method)
    ]


def source_of(places: Mapping[str, list[Point]], draft_len: int) -> str:
    """Return the text of MODULE."""
    rows = "\n".join(f"    {each!r}," for each in measured_of(places))
    titles = "\n".join(f"    {json.dumps(title)}," for title in places)
    text = (
        '"""Figures of a study, written by benchmarks/collect_compressors.py."""\n'
        "\nfrom __future__ import annotations\n"
        "\nfrom sglang_kvspec.planning.compressor_choice import Measured\n"
        f"\n# Drafts of a round.\nDRAFT_LEN = {draft_len}\n"
        f"# Models and prompts.\nPLACES: tuple[str, ...] = (\n{titles}\n)\n"
        f"MEASURED: tuple[Measured, ...] = (\n{rows}\n)\n"
    )
    command = [sys.executable, "-m", "ruff", "format", f"--stdin-filename={MODULE}", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout


def _is_plain(method: Method) -> bool:
    if method.scorer == ALL_TOKENS:
        return method.anchors != PLAIN and BEFORE_ROTARY not in method.anchors
    return method.anchors == DENSE4_LABEL and method.scorer in SCORERS.names()


def _measured(method: Method, points: list[Point]) -> Measured:
    codec, _, bits = method.anchors.rpartition("_")
    columns = {
        what: tuple(round(point[what], digits) for point in points)
        for what, digits in FRACTION_DIGITS.items()
    }
    width = int(bits.removesuffix("bit"))
    return Measured(method.scorer, codec, width, method.budget, **columns)
