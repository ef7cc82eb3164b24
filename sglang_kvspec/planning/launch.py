"""The command that starts a server as a forecast recommends."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, inf
from pathlib import Path

from sglang_kvspec.core.config import (
    DEFAULT_PAGE_SIZE,
    MOST_AUTO_DRAFTS,
    MOST_AUTO_DRAFTS_OFFLOADED,
)
from sglang_kvspec.core.flags import FLAG_OF
from sglang_kvspec.core.units import GIB
from sglang_kvspec.planning.draft_budget import ALL_PAGES
from sglang_kvspec.planning.forecast import Deployment, Forecast
from sglang_kvspec.planning.throughput import Cycle, Expectation

LAUNCHER = ("python", "-m", "sglang.launch_server")
# Host memory makes prefill take one request at a time, so it has to promise more than this.
LEAST_HOST_GAIN = 1.05
# The store holds a page for each page of the pool, not only those of running requests.
STORE_MARGIN = 1.1
# The model of a config file that lies outside of the model's own folder.
UNKNOWN_MODEL = "MODEL"


@dataclass(frozen=True, slots=True)
class Launch:
    """A recommended command line, and one sentence that says why."""

    arguments: tuple[str, ...]
    reason: str


def recommend(deployment: Deployment, chosen: Forecast, model: Path) -> Launch | None:
    """Return the command for the plan with the most tokens a second, None where nothing fits. On a
    GPU whose kernels were not measured, it starts plain SGLang.

    model: the path of the plan's `--model`.
    """
    resident, fetched = chosen.resident, chosen.fetched
    needs_host = fetched.tokens_per_s > LEAST_HOST_GAIN * resident.tokens_per_s
    best = fetched if needs_host else resident
    if not best.tokens_per_s:
        return None
    arguments = [*LAUNCHER, "--model-path", model_path(model)]
    if deployment.tp > 1:
        arguments += ["--tp", str(deployment.tp)]
    arguments += ["--mem-fraction-static", f"{deployment.memory_share:g}"]
    if not deployment.device.has_figures:
        reason = (
            f"KVSpec's Triton kernels were never measured on {deployment.device.name}, so the "
            "figures are an estimate and the command starts plain SGLang."
        )
        return Launch(tuple(arguments), reason)
    if best.cycle is None:
        reason = "Speculation does not pay here, so the command starts plain SGLang."
        return Launch(tuple(arguments), reason)
    host_gib = store_gib(deployment, best) if needs_host else 0
    arguments += _kvspec_arguments(deployment, best.cycle, host_gib)
    if best.setting.copies_bytes:
        arguments += ["--kvspec-draft-weights", "int4"]
    place = "host memory" if needs_host else "HBM"
    plain = best.setting.plain_tokens_per_s
    return Launch(
        tuple(arguments),
        f"With residuals in {place}, {best.tokens_per_s:,.0f} tokens/s are expected, against "
        f"{plain:,.0f} with plain SGLang.",
    )


def model_path(model: Path) -> str:
    """Return the folder of a model, or UNKNOWN_MODEL for a config file that has another name."""
    if model.is_dir():
        return str(model)
    return str(model.parent) if model.name == "config.json" else UNKNOWN_MODEL


def store_gib(deployment: Deployment, expected: Expectation) -> float:
    """Return the GiB of host memory that a plan needs, of all ranks together; 0 without a cycle.
    No more than the deployment has."""
    if expected.cycle is None:
        return 0
    stored = expected.cycle.num_requests * expected.setting.request.stored * deployment.tp
    wanted = ceil(stored * STORE_MARGIN / GIB)
    if deployment.host_bytes == inf:
        return wanted
    # Round down to hundredths: a server refuses more than its machine has.
    return min(wanted, floor(deployment.host_bytes / GIB * 100) / 100)


def _kvspec_arguments(deployment: Deployment, cycle: Cycle, host_gib: float) -> list[str]:
    arguments = ["--kvspec", "--kvspec-target", deployment.target]
    if deployment.codec != FLAG_OF["codec"].default:
        arguments += ["--kvspec-codec", deployment.codec]
    if host_gib:
        arguments += ["--kvspec-host-gb", f"{host_gib:g}"]
        if deployment.exact_residual == "packed":
            arguments += ["--kvspec-exact-residual", "packed"]
    if cycle.draft_len > (MOST_AUTO_DRAFTS_OFFLOADED if host_gib else MOST_AUTO_DRAFTS):
        arguments += ["--kvspec-draft-len", str(cycle.draft_len)]
    if deployment.draft_budget == ALL_PAGES:
        arguments += ["--kvspec-draft-view", "all"]
    elif deployment.draft_budget is not None:
        arguments += ["--kvspec-draft-budget", f"{deployment.draft_budget:g}"]
    if deployment.page_size != DEFAULT_PAGE_SIZE:
        arguments += ["--page-size", str(deployment.page_size)]
    return [*arguments, "--max-running-requests", str(cycle.num_requests)]
