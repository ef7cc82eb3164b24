"""The least time that a round can take: the bytes it has to read, counted, at the bandwidth of a
copy. What reads no weights and no KV counts as free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.kernel_names import ATTENTION, MATRIX
from serving.profiled_run import ProfiledRun
from serving.trace_rounds import Phase
from sglang_kvspec.planning.devices import DEVICES, Device
from sglang_kvspec.planning.model_shape import DTYPE_BYTES, ModelShape
from sglang_kvspec.planning.record_bytes import page_bytes_of

# Bytes an element of the KV caches that plain SGLang can be told to use.
KV_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, **DTYPE_BYTES}

Place = tuple[Phase, str]


@dataclass(frozen=True, slots=True)
class Work:
    """What one round does on one rank, on average.

    steps: draft steps, or 1 on plain SGLang. step_rows: requests that take part in a step.
    verify_tokens: tokens that a request verifies, its drafts and one more. *_bytes: of HBM.
    """

    steps: float
    step_rows: float
    requests: int
    verify_tokens: float
    context_len: float
    weight_bytes: float
    step_kv_bytes: float
    verify_kv_bytes: float

    def bytes_read(self) -> dict[Place, float]:
        """Of a whole round, by phase and category."""
        found = {
            (Phase.STEPS, MATRIX): self.steps * self.weight_bytes,
            (Phase.STEPS, ATTENTION): self.steps * self.step_rows * self.step_kv_bytes,
        }
        if self.verify_tokens:
            found[Phase.REST, MATRIX] = self.weight_bytes
            found[Phase.REST, ATTENTION] = self.requests * self.verify_kv_bytes
        return found


def work_of(run: ProfiledRun, shape: ModelShape, steps: float) -> Work:
    """shape: of one rank. steps: draft steps a round, as found in the trace.

    step_rows follow from KVSpec's counters over some rounds around the profile: requests may draft
    fewer tokens than the round has steps.
    """
    # Of routed experts only those of one token: more are read, but how many is up to the tokens.
    weights = shape.params_per_token * shape.weight_bytes_per_param
    if run.target is None:
        kv = run.context_len * shape.kv_bytes_per_token * _plain_share(run, shape)
        return Work(1, run.requests, run.requests, 0, run.context_len, weights, kv, 0)
    page = page_bytes_of(shape, run.codec, run.target, run.page_size)  # type: ignore[arg-type]
    # The newest pages are read in full precision; at least these are.
    recent = min(run.kvspec_config["recent_pages"] * run.page_size, run.context_len)
    past, window = run.context_len - recent, recent * shape.kv_bytes_per_token
    verified = page.residual + (page.anchor if run.target == "int8" else 0)
    drafted = run.counters.get("drafted", 0) / run.counters["verifications"]
    return Work(
        steps=steps,
        step_rows=min(run.requests, run.requests * drafted / steps),
        requests=run.requests,
        verify_tokens=drafted + 1,
        context_len=run.context_len,
        weight_bytes=weights,
        step_kv_bytes=past * page.anchor / run.page_size + window,
        verify_kv_bytes=past * verified / run.page_size + window,
    )


def floor_ms(work: Work, bandwidth: float) -> dict[Place, float]:
    """Milliseconds a round by phase and category. bandwidth: bytes/s."""
    return {place: 1e3 * count / bandwidth for place, count in work.bytes_read().items()}


def arithmetic_ms(work: Work, shape: ModelShape, device: Device) -> dict[Place, float]:
    """Milliseconds a round that a verification's arithmetic takes at the published speed: where
    many tokens are verified, it and not the bytes may be what binds."""
    tokens = work.requests * work.verify_tokens
    pairs = tokens * work.context_len
    flops = {
        (Phase.REST, MATRIX): 2 * shape.params_per_token * tokens,
        (Phase.REST, ATTENTION): 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs,
    }
    return {place: 1e3 * count / device.flops for place, count in flops.items() if count}


def device_of(machine: str) -> Device | None:
    """The planner's GPU of that name, such as "NVIDIA H200"; None where it knows none."""
    words = gpu_name(machine).removeprefix("NVIDIA ").split()
    return DEVICES.get(words[0]) if words else None


def gpu_name(machine: str) -> str:
    """Without how many there are: each of a server's ranks has one."""
    return re.sub(r"^\d+ x ", "", machine)


def copy_bandwidth(results: Path, machine: str) -> float | None:
    """Bytes/s, read plus written, as bench_attention.py measured on such a GPU; None where
    `results` is of another."""
    record: Mapping[str, object] = json.loads(results.read_text(encoding="utf-8"))
    if record["machine"] != gpu_name(machine):
        return None
    figures: list[dict[str, float]] = record["figures"]  # type: ignore[assignment]
    return next(f["value"] * 1e12 for f in figures if f["name"] == "copy.tbps")


def _plain_share(run: ProfiledRun, shape: ModelShape) -> float:
    """Bytes of plain SGLang's KV elements against those of the model's own dtype."""
    given = [text.split("=")[1] for text in run.server_arguments if "--kv-cache-dtype=" in text]
    return KV_BYTES[given[-1]] / shape.kv_dtype_bytes if given else 1.0
