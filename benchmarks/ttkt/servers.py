"""Pairs of servers with a link of any speed, on CPUs or on GPUs that several pairs share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from serving.environment import server_environment

from kvspec_testkit.servers.server_pair import ServerPair
from kvspec_testkit.servers.server_process import CPU_ARGUMENTS

LINK_CONTROL = Path(__file__).resolve().parent / "link_control"
# Faster than any loopback, so that the link delays nothing.
NO_LIMIT_GBPS = 1000.0
START_TIMEOUT_S = 600.0
PAGE_SIZE = 64
# Room for drafts, and for a request that is still ending when the next one comes.
SPARE_TOKENS = 4096


@dataclass(frozen=True)
class Platform:
    """Platform of servers. arguments: arguments of every server. itemsize: bytes of an element of
    the KV cache. warm_up_tokens: tokens to generate for each prompt before it is measured."""

    dtype: str
    itemsize: int
    arguments: tuple[str, ...]
    warm_up_tokens: int


CPU = Platform("float32", 4, (*CPU_ARGUMENTS, "--mem-fraction-static=0.3"), 2)
# Servers that start at once count each other's memory as their own use. With this fraction, the
# requested tokens always fit. Without deterministic inference, answers differ at ties of bf16, in
# any transfer mode.
GPU = Platform(
    "bfloat16",
    2,
    (
        "--dtype=bfloat16",
        "--mem-fraction-static=0.7",
        "--sampling-backend=pytorch",
        "--grammar-backend=none",
        "--random-seed=0",
        "--sleep-on-idle",
        "--enable-deterministic-inference",
    ),
    64,
)


@dataclass(frozen=True)
class Setup:
    """Setup of all pairs. num_tokens: tokens of all prompts, which prefill servers keep cached.
    prefixes: folder that keeps prefixes over restarts, None for none. server_args: more flags of
    every server."""

    platform: Platform
    model: Path
    num_tokens: int
    logs: Path
    scratch: Path
    prefixes: Path | None = None
    server_args: Sequence[str] = field(default_factory=tuple)

    @property
    def max_total_tokens(self) -> int:
        return -(-(self.num_tokens + SPARE_TOKENS) // PAGE_SIZE) * PAGE_SIZE


class LinkedPair:
    """Prefill and decode server of one transfer mode. gpu: index of the only GPU that they see,
    None for CPUs."""

    def __init__(self, setup: Setup, mode: str, gpu: int | None) -> None:
        self.mode, self.gpu = mode, gpu
        self._link = setup.scratch / f"{mode}.gbps"
        self.set_link(NO_LIMIT_GBPS)
        environment = server_environment(setup.scratch, None)
        environment["PYTHONPATH"] += os.pathsep + str(LINK_CONTROL)
        environment["KVSPEC_LINK_FILE"] = str(self._link)
        # By default, SGLang sends a cached prompt's KV before its prefill, which computes the last
        # page.
        environment["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "false"
        if gpu is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
        prefixes = ()
        if setup.prefixes is not None:
            prefixes = (f"--kvspec-prefix-dir={setup.prefixes / 'store'}",)
        is_split = mode in ("split", "packed")
        # Other modes decode without drafts, like servers without anchors.
        draft_len = "auto" if is_split else 0
        self.pair = ServerPair(
            (
                *setup.platform.arguments,
                f"--model-path={setup.model}",
                f"--max-total-tokens={setup.max_total_tokens}",
                "--max-running-requests=4",
                "--kvspec",
                f"--kvspec-transfer={'split' if is_split else mode}",
                f"--kvspec-exact-residual={'packed' if mode == 'packed' else 'raw'}",
                f"--kvspec-draft-len={draft_len}",
                *setup.server_args,
            ),
            log_folder=setup.logs / mode,
            prefill=(f"--kvspec-link-gbps={NO_LIMIT_GBPS}", *prefixes),
            environment=environment,
        )

    def set_link(self, gbps: float) -> None:
        # Replace the file in one step: the server may read it at any moment.
        draft = self._link.with_suffix(".new")
        draft.write_text(repr(gbps), encoding="ascii")
        draft.replace(self._link)


@contextmanager
def running(
    setup: Setup, modes: Sequence[str], gpus: Sequence[int | None]
) -> Iterator[list[LinkedPair]]:
    """Run a pair for each mode, all started at once, on the GPUs in turn. Yield the pairs."""
    pairs = [LinkedPair(setup, mode, gpus[i % len(gpus)]) for i, mode in enumerate(modes)]
    deadline = time.monotonic() + START_TIMEOUT_S
    with ExitStack() as stack:
        for pair in pairs:
            stack.enter_context(pair.pair)
        for pair in pairs:
            pair.pair.wait_healthy(max(deadline - time.monotonic(), 1.0))
        yield pairs
