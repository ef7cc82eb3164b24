"""The servers of a session by name, on one platform."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from live_server import LiveServer
from serving.environment import server_environment

from kvspec_testkit.servers.prefix_server_process import PrefixServerProcess
from kvspec_testkit.servers.server_pair import ServerPair
from kvspec_testkit.servers.server_process import CPU_ARGUMENTS
from kvspec_testkit.transport.proxy import Proxy

START_TIMEOUT_S = 480.0
PAGE = 64
# Requests that run at once. One server takes as many as there may be prompts.
MOST_RUNNING, MANY_RUNNING = 16, 48
FAULTS = Path(__file__).resolve().parents[1] / "sglang" / "faults"
CHAT_TEMPLATE = FAULTS.parent / "harness" / "chat.jinja"
ON_GPU = (
    "--dtype=bfloat16",
    "--random-seed=0",
    "--sampling-backend=pytorch",
    "--disable-prefill-cuda-graph",
    "--enable-deterministic-inference",
    # An idle scheduler would take a core, and a dozen of them wait for their tests.
    "--sleep-on-idle",
)
# GPU servers draft in rounds.
ON_CPU = (*CPU_ARGUMENTS, "--kvspec-schedule=rounds")
COMMON = (
    "--kvspec",
    # Many servers share the memory, and each needs a few MB for its KV. A server that starts counts
    # what others allocate meanwhile as its own, so --max-total-tokens decides.
    "--mem-fraction-static=0.8",
    f"--page-size={PAGE}",
    f"--max-running-requests={MOST_RUNNING}",
    f"--chat-template={CHAT_TEMPLATE}",
)
# A tenth of the pages, beside the first and the newest ones, which drafts always read.
PAGES = ("--kvspec-draft-view=pages", "--kvspec-draft-budget=0.1")
# Otherwise the server may find that drafts of a small model do not pay.
ALWAYS_DRAFTS = "--kvspec-draft-len=12"
# More than the residuals of any large pool. A store takes what the pool needs.
HOSTED = "--kvspec-host-gb=8"
# Rotated anchors.
TURBOQUANT = ("--kvspec-codec=turboquant", "--kvspec-anchor-bits=4")
INT8 = "--kvspec-target=int8"
INT4_WEIGHTS = "--kvspec-draft-weights=int4"
# The server may also find that proposals do not pay.
NGRAM = ("--kvspec-drafter=ngram", "--kvspec-ngram-always=true")
# Scores of a prompt's pages. Those of all heads compete in the second, so that lists of pages have
# different lengths.
SCORES = ("--kvspec-compressor=snapkv:window=16", "--kvspec-draft-budget=0.1")
FREED = ("--kvspec-compressor=snapkv:window=16,keep_anchors=false", "--kvspec-draft-budget=0.1")
# Prompts that are read a second time.
REPEATS = ("--kvspec-compressor=kvzip", "--kvspec-draft-budget=0.1")
# Residuals in host memory, in tiers and on links hold only what anchors do not tell. This needs KV
# of 16 bits.
PACKED = ("--kvspec-exact-residual=packed", HOSTED)
ONLY_ON_GPU = ("packed hosted", "kept packed", "packed pair", "freed packed")
# Servers start with this switch where no GPU has run their flags yet.
UNTESTED = {"SGLANG_KVSPEC_UNTESTED": "1"}
UNEVEN_SCORES = ("--kvspec-compressor=random:heads=model", "--kvspec-draft-budget=0.3")
KEPT = ("--kvspec-prefix-hbm-fraction=0.02", "--kvspec-prefix-host-gb=0.03")
# SGLang retracts a request at every fifth step of several requests.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
# Ranks would refuse GPUs of which one holds other servers.
SHARED_GPUS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
HOST = "--kvspec-prefix-host-gb=1"
WAIT = "--kvspec-prefix-wait-ms=20000"
# Pairs of a prefill and a decode server.
PAIRS = ("pair", "hosted pair", "packed pair")
# So slow a link that residuals arrive after several drafts.
LINK_GBPS = {True: 0.03, False: 0.006}


@dataclass(frozen=True, slots=True)
class Platform:
    """Where all servers run, their model, and their --kvspec-kernels."""

    model: Path
    on_gpu: bool
    kernels: str = "auto"

    @property
    def arguments(self) -> tuple[str, ...]:
        # SGLang's stripped wheel for machines without a package index has only llguidance.
        grammar = "xgrammar" if importlib.util.find_spec("xgrammar") else "llguidance"
        own = ON_GPU if self.on_gpu else ON_CPU
        return (
            f"--model-path={self.model}",
            *own,
            *COMMON,
            f"--grammar-backend={grammar}",
            f"--kvspec-kernels={self.kernels}",
        )


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens of both pools, and pages of a small residual cache. The large pool holds all that run
    at once. The small one holds little more than the longest request, which is much less than all
    prompts together, and so does the cache."""

    large: int
    small: int
    cache_pages: int

    @classmethod
    def of(cls, longest: int) -> Room:
        """longest: most tokens of a request, prompt and answer."""
        pages = -(-longest // PAGE)
        return cls((MOST_RUNNING + 5) * pages * PAGE, (pages + 16) * PAGE, pages + 12)


@dataclass(frozen=True, slots=True)
class Spec:
    """Flags of a server, or of both servers of a pair, besides those of all. pool_tokens: None for
    the large pool."""

    arguments: tuple[str, ...] = ()
    pool_tokens: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Fleet:
    """Servers by name. `fleet[name]` is a healthy server, which starts if it does not run yet.
    Use as a context manager, which stops all."""

    def __init__(self, platform: Platform, room: Room, scratch: Path, logs: Path) -> None:
        """scratch: folder for prefixes on disk and faults. logs: folder for logs."""
        self.room = room
        self.scratch = scratch
        self.logs = logs
        self.platform = platform
        self.environment = server_environment(scratch, None) | SHARED_GPUS
        self._servers: dict[str, LiveServer] = {}
        self._pairs: dict[str, ServerPair] = {}
        # Names of the servers that are healthy.
        self._healthy: set[str] = set()
        self._stack = ExitStack()
        self._specs: dict[str, Spec] = {}

    def __enter__(self) -> Self:
        """Start the prefix server, and a slow link to it."""
        store = PrefixServerProcess(self.scratch / "shared", self.environment)
        self._stack.enter_context(store)
        self.slow_link = Proxy(store.address)
        self._stack.callback(self.slow_link.close)
        self.fault_file = self.scratch / "active"
        self.fault_file.write_text("none")
        self._specs = self._all_specs(store.address)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> LiveServer:
        self.start(name)
        return self._servers[name]

    def pair(self, name: str) -> ServerPair:
        """Return a pair of PAIRS, both servers healthy."""
        self.start(name)
        return self._pairs[name]

    def start(self, *names: str) -> None:
        """Start all of these servers and pairs that do not run yet, at once, and wait until all are
        healthy."""
        begin = time.monotonic()
        self.launch(*names)
        # A health check generates a token, so each server is asked once.
        new = [name for name in dict.fromkeys(names) if name not in self._healthy]
        for name in new:
            (self._pairs.get(name) or self._servers[name]).wait_healthy(START_TIMEOUT_S)
            self._healthy.add(name)
        if new:
            print(f"healthy after {time.monotonic() - begin:.0f} s: {', '.join(new)}")

    def launch(self, *names: str) -> None:
        """Start all of these servers and pairs that do not run yet, at once, and do not wait."""
        for name in names:
            if name in self._servers or name in self._pairs:
                continue
            if name in PAIRS:
                self._pairs[name] = self._stack.enter_context(self._make_pair(name))
            else:
                self._servers[name] = self._stack.enter_context(self._make(name))

    def stop(self, name: str) -> None:
        self._healthy.discard(name)
        self._servers.pop(name).stop()

    def _make(self, name: str) -> LiveServer:
        spec = self._specs[name]
        return LiveServer(
            self._arguments(spec),
            log_path=self.logs / f"{name}.log",
            environment={**self.environment, **spec.environment},
        )

    def _make_pair(self, name: str) -> ServerPair:
        spec = self._specs[name]
        return ServerPair(
            self._arguments(spec),
            log_folder=self.logs / name,
            prefill=(f"--kvspec-link-gbps={LINK_GBPS[self.platform.on_gpu]}",),
            environment={**self.environment, **spec.environment},
        )

    def _arguments(self, spec: Spec) -> list[str]:
        pool_tokens = spec.pool_tokens or self.room.large
        return [*self.platform.arguments, f"--max-total-tokens={pool_tokens}", *spec.arguments]

    def _all_specs(self, prefix_server: str) -> dict[str, Spec]:
        faults = {"PYTHONPATH": f"{FAULTS}:{self.environment['PYTHONPATH']}"}
        small_cache = {**faults, "KVSPEC_CACHE_PAGES": str(self.room.cache_pages)}
        breakable = {**faults, "KVSPEC_FAULT_FILE": str(self.fault_file)}
        disk = f"--kvspec-prefix-dir={self.scratch / 'disk'}"
        shared = (f"--kvspec-prefix-server={prefix_server}", WAIT)
        slow = (f"--kvspec-prefix-server={self.slow_link.address}", WAIT)
        small = self.room.small
        tiers = (HOST, disk, *shared, "--kvspec-prefix-publish-gbps=10")
        return {
            "off": Spec(("--kvspec-draft-len=0",)),
            "exact": Spec((ALWAYS_DRAFTS,)),
            "pages": Spec((*PAGES, f"--max-running-requests={MANY_RUNNING}")),
            "int4 weights": Spec((INT4_WEIGHTS, ALWAYS_DRAFTS, *PAGES)),
            "ngram": Spec((*NGRAM, ALWAYS_DRAFTS, *PAGES)),
            "ngram int4": Spec((*NGRAM, INT4_WEIGHTS, ALWAYS_DRAFTS), environment=RETRACT),
            "scores": Spec((*SCORES, ALWAYS_DRAFTS, "--chunked-prefill-size=256")),
            "uneven scores": Spec((*UNEVEN_SCORES, ALWAYS_DRAFTS, HOSTED)),
            "repeats": Spec((*REPEATS, ALWAYS_DRAFTS, HOSTED), environment=small_cache),
            "freed": Spec((*FREED, ALWAYS_DRAFTS, "--chunked-prefill-size=256")),
            "freed hosted": Spec(
                (*FREED, ALWAYS_DRAFTS, HOSTED), environment={**small_cache, **RETRACT}
            ),
            "freed packed": Spec(
                (*FREED, *PACKED, ALWAYS_DRAFTS),
                environment={**small_cache, **RETRACT, **UNTESTED},
            ),
            "log4": Spec(("--kvspec-codec=log4", *PAGES)),
            "turboquant": Spec((*TURBOQUANT, ALWAYS_DRAFTS, *PAGES), environment=UNTESTED),
            "small chunks": Spec(("--chunked-prefill-size=256", ALWAYS_DRAFTS, *PAGES)),
            "crowded": Spec(PAGES, 2 * small, RETRACT),
            "hosted": Spec((HOSTED, ALWAYS_DRAFTS, *PAGES), environment=small_cache),
            "packed hosted": Spec(
                (*PACKED, ALWAYS_DRAFTS, *PAGES), environment={**small_cache, **RETRACT}
            ),
            "broken": Spec(PAGES, environment={**faults, "KVSPEC_FAULT_FILE": str(self._broken())}),
            "tiers": Spec((*tiers, *PAGES), small),
            "fresh disk": Spec((disk, *PAGES)),
            "fresh remote": Spec((*shared, *PAGES)),
            "fresh host": Spec((HOST, HOSTED), small, small_cache),
            "early": Spec((*slow, *PAGES)),
            "kept": Spec((*KEPT, self._own_disk("kept"), *PAGES), small),
            "kept hosted": Spec((*KEPT, HOSTED, self._own_disk("hosted")), small, small_cache),
            "kept packed": Spec((*KEPT, *PACKED, self._own_disk("packed")), small, small_cache),
            "pair": Spec(("--kvspec-host-gb=0",)),
            "hosted pair": Spec((HOSTED, *PAGES), environment=small_cache),
            "packed pair": Spec((*PACKED, *PAGES), environment=small_cache),
            "int8 off": Spec((INT8, "--kvspec-draft-len=0")),
            "int8": Spec((INT8, *PAGES)),
            "int8 small chunks": Spec((INT8, "--chunked-prefill-size=256", *PAGES)),
            "int8 crowded": Spec((INT8, *PAGES), 2 * small, RETRACT),
            "int8 tiers": Spec((INT8, HOST), small),
            "ranks off": Spec(("--tp-size=2", "--kvspec-draft-len=0")),
            "ranks": Spec(("--tp-size=2", *PAGES), environment=breakable),
            "ranks ngram": Spec(("--tp-size=2", *NGRAM, ALWAYS_DRAFTS, *PAGES)),
            "ranks tiers": Spec(
                ("--tp-size=2", HOST, self._own_disk("ranks"), *PAGES), small, breakable
            ),
        }

    def _broken(self) -> Path:
        """Return a fault file of its own: captured graphs keep the fault that was active at the
        start."""
        path = self.scratch / "broken"
        path.write_text("sums_by_rows")
        return path

    def _own_disk(self, name: str) -> str:
        return f"--kvspec-prefix-dir={self.scratch / name}"
