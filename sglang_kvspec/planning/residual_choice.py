"""Choice of the form of residuals in host memory, for --kvspec-exact-residual auto."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_kvspec.core.config import ExactResidual
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.forecast import Deployment
from sglang_kvspec.planning.gains import least_and_most

# Packed residuals may cost this share of the tokens a second somewhere, and must gain this factor
# elsewhere. No server has shown a gain yet: the one that was measured made 0.93 of the rate of raw
# residuals, where 0.95 was expected (docs/benchmarks/exact-residual.md). So it must be clear.
LEAST_KEPT, LEAST_GAIN = 0.98, 1.25


@dataclass(frozen=True, slots=True)
class ResidualChoice:
    """Form of residuals outside of the KV cache, and why, as the end of a sentence."""

    form: ExactResidual
    reason: str


def choose_residual(deployment: Deployment) -> ResidualChoice:
    """Compare packed residuals in host memory with raw ones."""
    if not deployment.host_bytes:
        return ResidualChoice("raw", "there is no host memory for residuals")
    raw, packed = (replace(deployment, exact_residual=form) for form in ("raw", "packed"))
    try:
        least, most = least_and_most(raw, packed)
    except ConfigError as error:
        return ResidualChoice("raw", f"packed residuals have no forecast: {error}")
    if least.ratio < LEAST_KEPT:
        return ResidualChoice("raw", f"packed residuals promise {least}")
    form: ExactResidual = "packed" if most.ratio >= LEAST_GAIN else "raw"
    return ResidualChoice(form, f"packed residuals promise {most}")
