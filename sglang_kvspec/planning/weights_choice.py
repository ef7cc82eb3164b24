"""Choice of the weights that drafts of a server read, for --kvspec-draft-weights auto."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_kvspec.core.config import Weights
from sglang_kvspec.planning.forecast import Deployment
from sglang_kvspec.planning.gains import least_and_most

# Copies may cost this share of the tokens a second somewhere, and must gain this factor elsewhere.
LEAST_KEPT, LEAST_GAIN = 0.98, 1.05


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """Weights of drafts, and why, as the end of a sentence."""

    weights: Weights
    reason: str


def choose_weights(deployment: Deployment) -> WeightsChoice:
    """Compare copies in 4 bits with the model's own weights."""
    if not deployment.can_copy:
        return WeightsChoice("target", "the model has no linear layers in 16 bits")
    if deployment.copies_bytes >= deployment.kv_bytes:
        return WeightsChoice("target", "there is no room for copies")
    own, copies = (replace(deployment, draft_weights=each) for each in ("target", "int4"))
    least, most = least_and_most(own, copies)
    if least.ratio < LEAST_KEPT:
        return WeightsChoice("target", f"copies promise {least}")
    weights: Weights = "int4" if most.ratio >= LEAST_GAIN else "target"
    return WeightsChoice(weights, f"copies promise {most}")
