"""Choice of the form of residuals in host memory, for --kvspec-exact-residual auto."""

from __future__ import annotations

from dataclasses import replace

from sglang_kvspec.core.config import ExactResidual
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.forecast import Deployment
from sglang_kvspec.planning.gains import Choice, choose_by_gain

# Gain in tokens a second for which residuals are packed. No server has shown a gain yet: the one
# that was measured made 0.93 of the rate of raw residuals, where 0.95 was expected
# (docs/benchmarks/exact-residual.md). So it must be clear.
LEAST_GAIN = 1.25


def choose_residual(deployment: Deployment) -> Choice[ExactResidual]:
    """Compare packed residuals in host memory with raw ones."""
    if not deployment.host_bytes:
        return Choice("raw", "there is no host memory for residuals")
    values: tuple[ExactResidual, ExactResidual] = ("raw", "packed")
    raw, packed = (replace(deployment, exact_residual=each) for each in values)
    try:
        return choose_by_gain(raw, packed, values, LEAST_GAIN, "packed residuals")
    except ConfigError as error:
        return Choice("raw", f"packed residuals have no forecast: {error}")
