"""Measured requests as data, and the JSON lines that keep them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ttkt.disaggregated_requests import Answer

TOKENS = (2, 8, 32, 64)


@dataclass(frozen=True, slots=True)
class Point:
    """One measured request. Times are in seconds since the prefill ended.

    full_s: seconds that the link takes for the prompt's full KV. computed_s: when the tokens of
    TOKENS were computed. seen_s: when a client had them. anchors_s, residuals_s: when anchors and
    residuals had arrived. output: token ids of the answer.
    """

    mode: str
    prompt_len: int
    prompt: int
    full_s: float
    computed_s: tuple[float, ...]
    seen_s: tuple[float, ...]
    anchors_s: float
    residuals_s: float | None
    drafted_first: int
    accepted_first: int
    num_bytes: int
    output: tuple[int, ...]

    @classmethod
    def of(cls, answer: Answer, mode: str, prompt_len: int, prompt: int, full_s: float) -> Point:
        transfer = answer.transfer
        return cls(
            mode=mode,
            prompt_len=prompt_len,
            prompt=prompt,
            full_s=full_s,
            computed_s=tuple(answer.computed_s(k) for k in TOKENS),
            seen_s=tuple(answer.seen_s(k) for k in TOKENS),
            anchors_s=transfer["seconds"]["anchors"],
            residuals_s=transfer["seconds"]["residuals"],
            drafted_first=len(transfer["drafts_s"]),
            accepted_first=transfer["accepted_first"],
            num_bytes=sum(transfer["bytes"].values()),
            output=answer.output_ids,
        )

    @property
    def key(self) -> tuple[int, int, float]:
        """Return the key that points of different modes have in common."""
        return self.prompt_len, self.prompt, self.full_s


def append_point(path: Path, point: Point) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(point)) + "\n")


def read_points(path: Path) -> list[Point]:
    points = []
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        for name in ("computed_s", "seen_s", "output"):
            values[name] = tuple(values[name])
        points.append(Point(**values))
    return points


def of_mode(points: Iterable[Point], mode: str) -> dict[tuple[int, int, float], Point]:
    return {point.key: point for point in points if point.mode == mode}
