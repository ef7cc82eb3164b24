"""Costs of rounds of the 8B shape, from the planner's forecast for a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_kvspec.planning.costs import IterationCosts
from sglang_kvspec.planning.devices import find_device
from sglang_kvspec.planning.forecast import MEASURED_ACCEPTANCE, Deployment
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.rounds import RoundCost

MS = 1e-3
MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "llama-3.1-8b.json"
GPU, CODEC, CONTEXT_LEN, BUDGET = "H100", "uniform4", 32768, 0.05
# Drafts of each request between which the cost of a verified token is a straight line.
LINE_DRAFTS = 16


@dataclass(frozen=True, slots=True)
class Point:
    """Milliseconds of the parts of a round. step_ms: a draft step of all requests, of which each
    takes row_ms. verify_ms: a verification of the pending tokens alone; each draft adds token_ms.
    plain_ms: a plain step."""

    name: str
    num_requests: int
    step_ms: float
    row_ms: float
    verify_ms: float
    token_ms: float
    plain_ms: float

    def cost(self) -> RoundCost:
        """Return the costs as planning takes them, in seconds."""
        count = self.num_requests
        step = self.step_ms - count * self.row_ms
        request = (self.verify_ms - step) / count - self.token_ms
        plain = self.plain_ms / (step + count * request)
        return RoundCost(step * MS, self.row_ms * MS, request * MS, self.token_ms * MS, plain)


def point_of(num_requests: int) -> Point:
    """Return the forecast for num_requests requests whose drafts read 4-bit weights and BUDGET of
    the pages, and whose verifications are exact."""
    model = ModelShape.from_config(json.loads(MODEL.read_text(encoding="utf-8")))
    curve = MEASURED_ACCEPTANCE[CODEC]
    deployment = Deployment(model, find_device(GPU), curve, CODEC, draft_weights="int4")
    costs = deployment.setting(CONTEXT_LEN, BUDGET, "int4").costs
    kv_tokens = num_requests * CONTEXT_LEN
    verify = _verify_seconds(costs, num_requests, 0)
    longer = _verify_seconds(costs, num_requests, LINE_DRAFTS)
    return Point(
        name=f"bs{num_requests}",
        num_requests=num_requests,
        step_ms=costs.seconds(num_requests, kv_tokens, 0, 0, 0) / MS,
        row_ms=costs.draft_kv_token_s * CONTEXT_LEN / MS,
        verify_ms=verify / MS,
        token_ms=(longer - verify) / (num_requests * LINE_DRAFTS) / MS,
        plain_ms=costs.plain_seconds(num_requests, kv_tokens) / MS,
    )


def _verify_seconds(costs: IterationCosts, num_requests: int, num_drafts: int) -> float:
    """Return the seconds of a verification of num_drafts drafts of each request."""
    tokens = num_requests * (1 + num_drafts)
    return costs.seconds(0, 0, num_requests, tokens, num_requests * CONTEXT_LEN)


POINTS = (point_of(1), point_of(16))
