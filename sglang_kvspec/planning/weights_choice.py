"""Choice of the weights that drafts of a server read, for --kvspec-draft-weights auto."""

from __future__ import annotations

from dataclasses import replace

from sglang_kvspec.core.config import Weights
from sglang_kvspec.planning.forecast import Deployment
from sglang_kvspec.planning.gains import Choice, choose_by_gain

# Gain in tokens a second for which copies are made.
LEAST_GAIN = 1.05


def choose_weights(deployment: Deployment) -> Choice[Weights]:
    """Compare copies in 4 bits with the model's own weights."""
    if not deployment.can_copy:
        return Choice("target", "the model has no linear layers in 16 bits")
    if deployment.copies_bytes >= deployment.kv_bytes:
        return Choice("target", "there is no room for copies")
    values: tuple[Weights, Weights] = ("target", "int4")
    own, copies = (replace(deployment, draft_weights=each) for each in values)
    return choose_by_gain(own, copies, values, LEAST_GAIN, "copies")
