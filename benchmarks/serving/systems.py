"""Systems to compare, and all server flags that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS
from serving.points import Model

BASELINE = "bf16"
EXACT, INT8 = (("--kvspec", f"--kvspec-target={name}") for name in ("exact", "int8"))
ALL_PAGES = "--kvspec-draft-view=all"
# End of the names of systems whose drafts read all pages.
READS_ALL = "-all"
DRAFT_WEIGHTS = "--kvspec-draft-weights=int4"
# End of the names of systems that draft with weights in 4 bits.
INT4_WEIGHTS = "-w4"
DETERMINISTIC = "--enable-deterministic-inference"


@dataclass(frozen=True, slots=True)
class System:
    """One system. target: the target that KVSpec verifies against, None for plain SGLang."""

    name: str
    arguments: tuple[str, ...] = ()
    target: str | None = None


SYSTEMS = {
    system.name: system
    for system in (
        System(BASELINE),
        System("fp8", ("--kv-cache-dtype=fp8_e4m3",)),
        System("exact", EXACT, target="exact"),
        System("int8", INT8, target="int8"),
        System(f"exact{READS_ALL}", (*EXACT, ALL_PAGES), target="exact"),
        System(f"int8{READS_ALL}", (*INT8, ALL_PAGES), target="int8"),
        System(f"exact{INT4_WEIGHTS}", (*EXACT, DRAFT_WEIGHTS), target="exact"),
        System(f"int8{INT4_WEIGHTS}", (*INT8, DRAFT_WEIGHTS), target="int8"),
        System("bf16-deterministic", (DETERMINISTIC,)),
        System("exact-deterministic", (*EXACT, DETERMINISTIC), target="exact"),
        System("int8-deterministic", (*INT8, DETERMINISTIC), target="int8"),
    )
}

COMMON = ("--random-seed=0",)
# Requests have no grammar and are not sampled. CUDA graphs of prefills would add half a minute to
# the start.
GPU = (
    "--mem-fraction-static=0.88",
    "--chunked-prefill-size=16384",
    "--grammar-backend=none",
    "--sampling-backend=pytorch",
    "--disable-prefill-cuda-graph",
)
# KVSpec's prefill and its exact verification use FlashInfer, too. SGLang's default on Hopper is
# FA3, which is not in SGLang's stripped wheel for machines without a package index.
PLAIN_GPU = ("--attention-backend=flashinfer",)
# Its deterministic prefills of 16384 tokens do not fit the workspace that SGLang gives it.
PLAIN_DETERMINISTIC_GPU = ("--attention-backend=triton",)
# The 8B shape keeps all residuals in HBM. Other models offload residuals if memory is scarce.
KVSPEC = {"8b": ("--kvspec-host-gb=0",)}


def server_arguments(
    model: Model,
    system: System,
    *,
    on_gpu: bool,
    codec: str,
    max_running: int,
    folder: str,
    extra: Sequence[str] = (),
    extra_kvspec: Sequence[str] = (),
) -> list[str]:
    """Return the arguments of `python -m sglang.launch_server`. Systems differ only in their own
    flags. extra: comes last, so it takes precedence. folder: folder with config and tokenizer, and
    with weights if there are any."""
    arguments = [
        f"--model-path={folder}",
        *(("--load-format=dummy",) if model.dummy else ()),
        *COMMON,
        *((*GPU, f"--cuda-graph-max-bs-decode={max_running}") if on_gpu else CPU_ARGUMENTS),
        f"--max-running-requests={max_running}",
        *system.arguments,
    ]
    if on_gpu and system.target is None:
        is_deterministic = DETERMINISTIC in system.arguments
        arguments += PLAIN_DETERMINISTIC_GPU if is_deterministic else PLAIN_GPU
    if system.target is not None:
        arguments += [f"--kvspec-codec={codec}", *KVSPEC.get(model.name, ()), *extra_kvspec]
    return [*arguments, *extra]
