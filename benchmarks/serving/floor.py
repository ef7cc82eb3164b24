"""Least time of a round: the bytes that it must read, at the bandwidth of a copy.

Kernels that read no weights and no KV count as free.
"""

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

# Bytes per element of the KV cache dtypes that plain SGLang can use.
KV_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, **DTYPE_BYTES}

Place = tuple[Phase, str]


@dataclass(frozen=True, slots=True)
class Work:
    """Mean work of one round on one rank.

    steps: draft steps, or 1 on plain SGLang. step_rows: requests that take part in a step.
    verify_tokens: tokens that a request verifies, its drafts and one more. *_bytes: bytes of HBM
    that are read.
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
        """Return the bytes read in a whole round, by phase and category."""
        found = {
            (Phase.STEPS, MATRIX): self.steps * self.weight_bytes,
            (Phase.STEPS, ATTENTION): self.steps * self.step_rows * self.step_kv_bytes,
        }
        if self.verify_tokens:
            found[Phase.REST, MATRIX] = self.weight_bytes
            found[Phase.REST, ATTENTION] = self.requests * self.verify_kv_bytes
        return found


def work_of(run: ProfiledRun, shape: ModelShape, steps: float) -> Work:
    """Return the mean work of a round. shape: model shape of one rank. steps: draft steps a round,
    as found in the trace.

    step_rows follows from KVSpec's counters over some rounds around the profile: requests may draft
    fewer tokens than the round has steps.
    """
    # Only the routed experts of one token count. More are read; how many depends on the tokens.
    weights = shape.params_per_token * shape.weight_bytes_per_param
    if run.target is None:
        kv = run.context_len * shape.kv_bytes_per_token * _plain_share(run, shape)
        return Work(1, run.requests, run.requests, 0, run.context_len, weights, kv, 0)
    page = page_bytes_of(shape, run.codec, run.target, run.page_size)  # type: ignore[arg-type]
    # At least these newest pages are read in full precision.
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
    """Return the floor in milliseconds a round, by phase and category. bandwidth: bytes/s."""
    return {place: 1e3 * count / bandwidth for place, count in work.bytes_read().items()}


def arithmetic_ms(work: Work, shape: ModelShape, device: Device) -> dict[Place, float]:
    """Return the milliseconds a round of a verification's arithmetic at the published speed. With
    many verified tokens, arithmetic may be the limit, not bytes."""
    tokens = work.requests * work.verify_tokens
    pairs = tokens * work.context_len
    flops = {
        (Phase.REST, MATRIX): 2 * shape.params_per_token * tokens,
        (Phase.REST, ATTENTION): 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs,
    }
    return {place: 1e3 * count / device.flops for place, count in flops.items() if count}


def device_of(machine: str) -> Device | None:
    """Return the planner's GPU of that name, such as "NVIDIA H200", or None if the planner does not
    know the name."""
    words = gpu_name(machine).removeprefix("NVIDIA ").split()
    return DEVICES.get(words[0]) if words else None


def gpu_name(machine: str) -> str:
    """Return the name without the number of GPUs: each rank of a server has one GPU."""
    return re.sub(r"^\d+ x ", "", machine)


def copy_bandwidth(results: Path, machine: str) -> float | None:
    """Return bytes/s, read plus written, as bench_attention.py measured on such a GPU. Return None
    if `results` is from another GPU."""
    record: Mapping[str, object] = json.loads(results.read_text(encoding="utf-8"))
    if record["machine"] != gpu_name(machine):
        return None
    figures: list[dict[str, float]] = record["figures"]  # type: ignore[assignment]
    return next(f["value"] * 1e12 for f in figures if f["name"] == "copy.tbps")


def _plain_share(run: ProfiledRun, shape: ModelShape) -> float:
    """Return the bytes of plain SGLang's KV elements over those of the model's own dtype."""
    given = [text.split("=")[1] for text in run.server_arguments if "--kv-cache-dtype=" in text]
    return KV_BYTES[given[-1]] / shape.kv_dtype_bytes if given else 1.0
