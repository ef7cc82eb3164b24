"""Requests over time: generated from a seed, or recorded as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from random import Random

from sglang_kvspec.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: arrival time, prompt tokens and output tokens."""

    arrival_s: float
    prompt_len: int
    output_len: int

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < inf or self.prompt_len < 1 or self.output_len < 1:
            raise ConfigError(
                "arrival_s must be finite and >= 0, prompt_len and output_len must be >= 1, "
                f"got {self}"
            )

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.output_len


def generate_trace(
    seed: int,
    num_requests: int,
    *,
    prompt_len: int,
    output_len: int,
    requests_per_s: float = inf,
    prompt_spread: float = 0.5,
    output_spread: float = 0.5,
) -> tuple[TraceRequest, ...]:
    """Generate Poisson arrivals (all at once for an infinite rate). Lengths are uniform around
    their means. Each spread is the largest deviation, as a share of the mean."""
    rng = Random(seed)
    now = 0.0
    requests = []
    for _ in range(num_requests):
        if requests_per_s < inf:
            now += rng.expovariate(requests_per_s)
        prompt = round(prompt_len * rng.uniform(1 - prompt_spread, 1 + prompt_spread))
        output = round(output_len * rng.uniform(1 - output_spread, 1 + output_spread))
        requests.append(TraceRequest(now, max(prompt, 1), max(output, 1)))
    return tuple(requests)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write one JSON object per line, with the fields of TraceRequest."""
    lines = (json.dumps(asdict(request)) for request in requests)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_trace(path: Path) -> tuple[TraceRequest, ...]:
    """Read requests in order of arrival. Raises ConfigError naming the first line that is no
    request."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            requests.append(TraceRequest(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number} is not a valid request: {error}") from error
    return tuple(sorted(requests, key=lambda request: request.arrival_s))
