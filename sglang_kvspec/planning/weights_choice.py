"""Choice of the weights that drafts of a server read, for --kvspec-draft-weights auto."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_kvspec.core.config import Weights
from sglang_kvspec.planning.forecast import Deployment, forecast

# Lengths of context to compare weights at, as far as the model has them.
CONTEXTS = (4096, 32768)
# Copies may cost this share of the tokens a second somewhere, and must gain this factor elsewhere.
LEAST_KEPT, LEAST_GAIN = 0.98, 1.05


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """Weights of drafts, and why, as the end of a sentence."""

    weights: Weights
    reason: str


def choose_weights(deployment: Deployment) -> WeightsChoice:
    """Compare copies in 4 bits with the model's own weights, for one request and for as many as the
    deployment may run, at all CONTEXTS. Residuals are where the deployment has room for them."""
    if not deployment.can_copy:
        return WeightsChoice("target", "the model has no linear layers in 16 bits")
    if deployment.copies_bytes >= deployment.kv_bytes:
        return WeightsChoice("target", "there is no room for copies")
    longest = deployment.model.max_context
    gains = {
        (context, count): _gain(replace(deployment, max_requests=count), context)
        for context in sorted({min(context, longest) for context in CONTEXTS})
        for count in sorted({1, deployment.max_requests})
    }
    least, most = (pick(gains, key=lambda place: gains[place]) for pick in (min, max))
    if gains[least] < LEAST_KEPT:
        return WeightsChoice("target", f"copies promise {_told(least, gains[least])}")
    weights: Weights = "int4" if gains[most] >= LEAST_GAIN else "target"
    return WeightsChoice(weights, f"copies promise {_told(most, gains[most])}")


def _gain(deployment: Deployment, context_len: int) -> float:
    """Return the tokens a second with copies, relative to the model's own weights. 1 where no
    request fits."""
    own, copies = (
        forecast(replace(deployment, draft_weights=weights), context_len).fetched.tokens_per_s
        for weights in ("target", "int4")
    )
    return copies / own if own else 1.0


def _told(place: tuple[int, int], gain: float) -> str:
    context, count = place
    requests = "1 request" if count == 1 else f"{count} requests"
    return f"{gain:.2f} times the tokens/s for {requests} of {context:,} tokens"
