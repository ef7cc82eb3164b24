"""Servers to simulate: a GPU, the share of its memory for KV, and the speed of its link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from planner.operating_point import OperatingPoint, choose_operating_point
from planner.schedules import LockStep, PlainDecoding, Sequential
from planner.simulation import Machine, simulate
from planner.staggered import Staggered
from planner.traces import TraceRequest, generate_trace
from sglang_kvspec.core.config import Target
from sglang_kvspec.planning.devices import Device, find_device
from sglang_kvspec.planning.forecast import MEASURED_ACCEPTANCE, Deployment
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.throughput import Setting

OUTPUT_LEN = 512
PROMPT_SPREAD = 0.05
# Draft lengths from which lock-step and sequential verification take their best.
BASELINE_DRAFT_LENS = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """One server to simulate.

    kv_share: share of HBM for KV; weights fill the rest. ratio: published HBM bandwidth over link
    bandwidth. sizes: "paper" takes VeriCache's sizes (anchors are a fifth of the KV, the rest is
    fetched) instead of the codec's.
    """

    gpu: str
    context_len: int
    kv_share: float
    ratio: float
    target: Target
    sizes: str = "log4"

    def deployment(self) -> Deployment:
        base = find_device(self.gpu)
        device: Device = replace(base, link_bytes_per_s=base.hbm_bytes_per_s / self.ratio)
        params = device.hbm_bytes * (1 - self.kv_share) / 2
        return Deployment(
            model_of(params),
            device,
            MEASURED_ACCEPTANCE["log4"],
            "log4",
            target=self.target,
            memory_share=1.0,
        )

    def setting(self) -> Setting:
        setting = self.deployment().setting(self.context_len + OUTPUT_LEN)
        if self.sizes != "paper":
            return setting
        plain = setting.request.plain
        request = replace(setting.request, always=0.2 * plain, residual=0.8 * plain)
        faster = replace(
            setting.costs, draft_kv_token_s=0.2 * setting.costs.plain_kv_token_s, kvspec_s=0.0
        )
        return replace(setting, request=request, costs=faster)

    def machine(self) -> Machine:
        setting = self.setting()
        page, tokens = self.deployment().page_bytes, self.deployment().page_size
        num_tokens = -(-setting.context_len // tokens) * tokens
        window = setting.request.always - num_tokens * page.anchor / tokens
        anchor, residual = page.anchor / tokens, page.residual / tokens
        if self.sizes == "paper":
            window, anchor, residual = 0.0, 0.2 * page.plain / tokens, 0.8 * page.plain / tokens
        return Machine(
            costs=setting.costs,
            curve=setting.curve,
            kv_bytes=int(setting.kv_bytes),
            link_bytes_per_s=setting.link_bytes_per_s,
            plain_bytes=page.plain / tokens,
            anchor_bytes=anchor,
            residual_bytes=residual,
            window_bytes=int(window),
            max_requests=setting.max_requests,
            max_draft_len=setting.max_draft_len,
        )


def model_of(params: float) -> ModelShape:
    """Return a model shape of `params` parameters. Layers and heads lie on a line through Qwen3-8B
    and Qwen3-32B."""
    share = (params - 8.2e9) / (32.8e9 - 8.2e9)
    return ModelShape(
        num_layers=round(36 + 28 * share),
        num_heads=max(8, round((32 + 32 * share) / 8) * 8),
        num_kv_heads=8,
        head_dim=128,
        dense_params=round(params),
        embed_params=0,
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Steady tokens/s by schedule. plan: staggered, or plain if staggered does not pay."""

    case: Case
    plain: float
    plan: float
    lock_step: float | None
    sequential: float | None
    point: OperatingPoint | None
    expected: float
    stall_share: float
    link_utilisation: float
    peak_share: float

    @property
    def speed_up(self) -> float:
        return self.plan / self.plain

    @property
    def link_suffices(self) -> bool:
        return bool(self.point and self.point.num_fetching and self.point.link_load < 1)


def run_case(case: Case, seed: int, *, baselines: bool) -> Outcome | None:
    """Simulate one case. Return None if plain decoding cannot hold one request: then there is
    nothing to compare with."""
    setting, machine = case.setting(), case.machine()
    longest = case.context_len * (1 + PROMPT_SPREAD) + 2 * OUTPUT_LEN
    if longest * machine.plain_bytes > machine.kv_bytes:
        return None
    point = choose_operating_point(machine, case.context_len + OUTPUT_LEN, OUTPUT_LEN)
    trace = make_trace(case, seed, setting, point)
    plain = simulate(PlainDecoding(machine), trace)
    plan = plain
    if point is not None:
        schedule = Staggered(machine, point.draft_len, point.num_requests, point.rooms)
        plan = simulate(schedule, trace)
    lock_step = sequential = None
    if baselines:
        lock_step = best_of(LockStep, machine, trace, setting)
        sequential = best_of(Sequential, machine, trace, setting)
    return Outcome(
        case,
        plain.tokens_per_s(),
        plan.tokens_per_s(),
        lock_step,
        sequential,
        point,
        point.tokens_per_s / setting.plain_tokens_per_s if point else 1.0,
        plan.stall_share(),
        plan.link_utilisation(machine.link_bytes_per_s),
        plan.peak_bytes / machine.kv_bytes,
    )


def make_trace(
    case: Case, seed: int, setting: Setting, point: OperatingPoint | None
) -> tuple[TraceRequest, ...]:
    """Return a trace of requests that arrive at once. They fill the larger batch four times, but
    are 12 at least and 640 at most."""
    batch = max(point.num_requests if point else 0, setting.plain_requests)
    return generate_trace(
        seed,
        min(max(4 * batch, 12), 640),
        prompt_len=case.context_len,
        output_len=OUTPUT_LEN,
        prompt_spread=PROMPT_SPREAD,
    )


def best_of(
    kind: type[LockStep], machine: Machine, trace: tuple[TraceRequest, ...], setting: Setting
) -> float:
    """Return the tokens/s of a schedule at its best draft length and number of requests; 0 if it
    holds no request."""
    limits = {n for n in (setting.resident_requests, setting.most_requests) if n}
    runs = [
        simulate(kind(machine, draft_len, limit), trace).tokens_per_s()
        for draft_len in BASELINE_DRAFT_LENS
        for limit in sorted(limits)
    ]
    return max(runs, default=0.0)


@dataclass(frozen=True, slots=True)
class LinkBound:
    """Result of a server whose link is the limit. demand: bytes that the requests would fetch
    during their forwards, over the bytes that the link moves in that time."""

    utilisation: float
    stall_share: float
    demand: float


def run_link_bound(case: Case, seed: int) -> LinkBound:
    """Simulate as many requests as fit, with short drafts: more than the link can serve. HBM keeps
    more rooms free than a busy link can fill, so that only the link is the limit."""
    draft_len = 8
    request, machine = case.setting().request, case.machine()
    link = machine.link_bytes_per_s

    def forward_s(num_requests: int) -> float:
        verifying = num_requests / (draft_len + 1)
        drafting = num_requests - verifying
        tokens = case.context_len
        return machine.costs.seconds(
            drafting, drafting * tokens, verifying, num_requests, verifying * tokens
        )

    def fitting(rooms: int) -> int:
        left = machine.kv_bytes - rooms * request.residual
        return min(int(left / request.always), machine.max_requests)

    rooms = 4 + ceil(2 * link * forward_s(fitting(2)) / request.residual)
    limit = fitting(rooms)
    trace = generate_trace(
        seed,
        min(4 * limit, 640),
        prompt_len=case.context_len,
        output_len=OUTPUT_LEN,
        prompt_spread=PROMPT_SPREAD,
    )
    report = simulate(Staggered(machine, draft_len, limit, rooms), trace)
    demand = limit * request.residual / ((draft_len + 1) * link * forward_s(limit))
    return LinkBound(report.link_utilisation(link), report.stall_share(), demand)
