"""Profile of a server's steady decoding, taken through its HTTP interface."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from acceptance.prompts import cut_prompts
from acceptance.report import versions

from serving.client import BenchError
from serving.live_server import LiveServer, counters_between, kvspec_of, timing_of
from serving.points import Point
from serving.stream import Progress, Stream

# Iterations of every answer before the profile: draft lengths adapt in the first iterations.
SETTLE = 6
# The first profiled iteration starts the profiler, and the last one only ends the iteration before
# it.
EXTRA_STEPS = 2
# Chunks of earlier iterations may arrive after the reply that the profile has started. The profiler
# writes its file before the iteration that follows the last profiled one.
EXTRA_CHUNKS = 3
PROFILE_ID = "profile"


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """Facts of a profile besides its trace.

    counters: increases of KVSpec's counters from just before to just after the profile, empty on
    plain SGLang. server_timing: times that the server itself measured before the profile
    (draft_iter_ms, verify_ms). iteration_ms: median time between an answer's chunks before the
    profile. context_len: tokens of prompt and answer, mean over the requests and the profile.
    """

    label: str
    model_config: dict[str, Any]
    system: str
    target: str | None
    codec: str
    acceptance: str
    requests: int
    prompt_len: int
    output_len: int
    context_len: float
    num_steps: int
    iteration_ms: float
    page_size: int
    tp_size: int
    kvspec_config: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    server_timing: dict[str, float] = field(default_factory=dict)
    server_arguments: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    acceptance_source: str = ""
    machine: str = ""
    commit: str = ""
    start_s: float = 0.0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ProfiledRun:
        """Read a file of write()."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def take_profile(
    server: LiveServer,
    point: Point,
    *,
    target: str | None,
    codec: str,
    source: str,
    output_len: int,
    steps: int,
    activities: Sequence[str],
    folder: Path,
) -> tuple[ProfiledRun, Path]:
    """Profile `steps` steady iterations, and EXTRA_STEPS more. Return the facts of the profile, and
    the trace of rank 0, a file below `folder`. source: description of the replayed acceptance.

    Prompts are sent once before, so that the profile has no prefill. Raises BenchError.
    """
    prompt_len, num_steps = point.prompt_len(output_len), steps + EXTRA_STEPS
    prompts = make_prompts(point, prompt_len, text=server.facts["acceptance"] == "real")
    server.flush()
    with Stream(server.base_url, prompts, 1, server.left_s()) as stream:
        stream.wait_end()
    with Stream(server.base_url, prompts, output_len, server.left_s()) as stream:
        # The first chunk comes from the prefill.
        stream.wait_chunks(1 + SETTLE)
        info = server.info()
        before = kvspec_of(info)
        earlier = stream.progress()
        server.post(
            "/start_profile",
            json={
                "output_dir": str(folder.resolve()),
                "num_steps": num_steps,
                "activities": list(activities),
                "profile_id": PROFILE_ID,
                "with_stack": False,
                "record_shapes": False,
            },
        )
        stream.wait_chunks(num_steps + EXTRA_CHUNKS)
        later = stream.progress()
        after = kvspec_of(server.info())
    grown = [mean((a.tokens, b.tokens)) for a, b in zip(earlier, later, strict=True)]
    facts = server.facts
    run = ProfiledRun(
        label=point.label,
        model_config=json.loads((point.model.folder / "config.json").read_text(encoding="utf-8")),
        system=facts["system"],
        target=target,
        codec=codec,
        acceptance=facts["acceptance"],
        requests=point.concurrency,
        prompt_len=prompt_len,
        output_len=output_len,
        context_len=prompt_len + mean(grown),
        num_steps=num_steps,
        iteration_ms=iteration_ms(earlier),
        page_size=info["page_size"],
        tp_size=info["tp_size"],
        kvspec_config=before.get("config", {}),
        counters=counters_between(before.get("counters", {}), after.get("counters", {})),
        server_timing=timing_of(before, point.concurrency),
        server_arguments=facts["server_arguments"],
        versions={**versions(), "sglang": info["version"]},
        acceptance_source=source,
        machine=facts["machine"],
        commit=facts["commit"],
        start_s=facts["start_s"],
    )
    return run, find_trace(folder)


def make_prompts(point: Point, prompt_len: int, *, text: bool) -> list[list[int]]:
    """Return prompts as token ids, by the point's seed: text outside the model's training data, or
    random tokens."""
    if text:
        windows, _ = cut_prompts(point.model.folder, point.concurrency, prompt_len, point.seed)
        return [[int(token) for token in window] for window in windows]
    draw, vocabulary = random.Random(point.seed), point.model.config("vocab_size")
    return [draw.choices(range(vocabulary), k=prompt_len) for _ in range(point.concurrency)]


def iteration_ms(answers: Sequence[Progress]) -> float:
    """Return the median time between two chunks of an answer, the first chunk left out."""
    between = [b - a for answer in answers for a, b in pairwise(answer.times[1:])]
    return 1000 * median(between)


def find_trace(folder: Path) -> Path:
    """Return the trace of rank 0. Raises BenchError if the profiler has not written exactly one."""
    found = sorted(folder.glob(f"{PROFILE_ID}-TP-0*.trace.json.gz"))
    if len(found) != 1:
        names = ", ".join(path.name for path in sorted(folder.iterdir())) or "nothing"
        raise BenchError(f"the profiler should have written one trace to {folder}, found {names}")
    return found[0]
