"""Check that a GPU server gives the same answers wherever a prompt's prefix comes from.

    python benchmarks/check_prefix_tiers_gpu.py --out prefix_tiers_h200.json
    python benchmarks/check_prefix_tiers_gpu.py --hosted --int8
    python benchmarks/check_prefix_tiers_gpu.py --kept --hosted --int8
    python benchmarks/check_prefix_tiers_gpu.py --ranks 2 --drift --kept
    python benchmarks/check_prefix_tiers_gpu.py --cpu

A prefix is computed, still resident, or read from host memory, from disk or from a prefix server.
All servers run on one GPU, or each on --ranks GPUs; the servers of a phase run at the same time.
The first phase has two servers. One has no prefix tiers; its answers are the reference. The other
has all tiers and a KV memory so small that prefixes are evicted and come back. The second phase has
three fresh servers. One has the disk folder of the first phase, one has its prefix server. The
third has that prefix server behind a slow link, and must start requests on anchors. --hosted adds a
server with residuals in pinned host memory. Servers run with --enable-deterministic-inference: a
token then depends neither on other requests nor on what is cached. So every difference is an error,
and so is a tier without a hit. --kept adds servers whose anchors stay in GPU memory when residuals
leave it. For these anchors only residuals come back, from host memory and from disk.

--int8: the same with the target int8, which has no deterministic attention. Prompts are sent one by
one with a fixed draft length, and only answers over cached prefixes are compared. Both servers then
compute the same rows over the same bytes. --drift: on every rank but rank 0, host memory and disk
refuse one page of eight, and lose one of eight that are requested. Ranks must then agree on the
pages that all have. --cpu: a dry run on the CPU, in float32.

Without an installed checkout, set PYTHONPATH=.:kernels:patches:testkit. Exits with 1 if an answer
differs or a tier was not used.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from acceptance.report import Figure, write_json
from bench_gpu_identity import prompts_of_all_lengths
from rich.console import Console
from serving.environment import ROOT, server_environment
from serving.kept_check import KeptCase, check_kept_anchors
from serving.tier_server import TierServer

from kvspec_testkit.servers.prefix_server_process import PrefixServerProcess
from kvspec_testkit.transport.proxy import Proxy

FAULTS = ROOT / "tests" / "sglang" / "faults"
# Tokens of both pools, and pages of the residual cache of --hosted. All prompts together are
# several times as large as the small pool. The cache holds little more than the longest prompt.
LARGE_POOL, SMALL_POOL, CACHE_PAGES = 32768, 4096, 40
# The residuals of a prompt take at most a second, but always many draft steps.
SLOW_BYTES_PER_S = 2e6

console = Console(width=110)


class Check:
    """Record of all comparisons. Each comparison prints one line."""

    def __init__(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self.prompts, self.new_tokens = prompts, new_tokens
        self.figures: list[Figure] = []
        self.num_wrong = 0

    def ask(self, server: TierServer, *, at_once: bool, backwards: bool = False) -> list[list[int]]:
        """Return the answers in the order of the prompts. backwards: send the last prompt first."""
        step = -1 if backwards else 1
        return server.ask(self.prompts[::step], self.new_tokens, at_once=at_once)[::step]

    def same(self, name: str, found: list[list[int]], expected: list[list[int]]) -> None:
        differ = sum(a != b for a, b in zip(found, expected, strict=True))
        self.note(f"{name}.differences", differ, f"of {len(expected)} answers", 0, differ > 0)

    def hits(self, name: str, server: TierServer, *tiers: str) -> None:
        """Note the hit tokens of each of these tiers so far. No hit in a tier is an error."""
        reported = server.report()["counters"]["hit_tokens"]
        for tier in tiers:
            num_tokens = server.hits[tier]
            is_wrong = min(num_tokens, reported[tier]) == 0
            self.note(f"{name}.hits.{tier}", num_tokens, "tokens", None, is_wrong)

    def note(
        self, name: str, value: float, unit: str, baseline: float | None, is_wrong: bool
    ) -> None:
        self.figures.append(Figure(f"prefix_tiers.gpu.{name}", value, unit, None, baseline))
        self.num_wrong += is_wrong
        console.print(f"{'WRONG' if is_wrong else 'fine '} {name}: {value} {unit}")


def main() -> None:
    args = parse_arguments()
    begin = time.monotonic()
    check = Check(prompts_of_all_lengths(args.model, args.prompts, args.longest), args.new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        environment = server_environment(scratch, None)
        if args.drift:
            (scratch / "faults").write_text("tiers_drift")
            environment["KVSPEC_FAULT_FILE"] = str(scratch / "faults")
            environment["PYTHONPATH"] = f"{FAULTS}:{environment['PYTHONPATH']}"
        with PrefixServerProcess(scratch / "shared", environment) as store:
            run(args, check, scratch, environment, store.address)
        if args.drift:
            fired = scratch / "faults.fired"
            assert fired.exists(), "the fault tiers_drift did not fire: no rank missed a page"
    seconds = round(time.monotonic() - begin, 1)
    console.print(f"{check.num_wrong} checks failed, after {seconds:.0f} s")
    if args.out is not None:
        write_json(
            args.out,
            "check_prefix_tiers",
            torch.device("cpu" if args.cpu else "cuda"),
            {
                "model": args.model.name,
                "prompts": [len(prompt) for prompt in check.prompts],
                "new_tokens": args.new_tokens,
                "codec": args.codec,
                "ranks": args.ranks,
                "drift": args.drift,
                "max_total_tokens": [LARGE_POOL, SMALL_POOL],
                "deterministic": not args.cpu,
                "seconds": seconds,
            },
            check.figures,
            commit=args.commit or None,
        )
    sys.exit(check.num_wrong > 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo-5m")
    parser.add_argument("--cpu", action="store_true", help="dry run on this machine's CPU")
    parser.add_argument(
        "--hosted", action="store_true", help="check a server with --kvspec-host-gb, too"
    )
    parser.add_argument("--kept", action="store_true", help="check servers that keep anchors, too")
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks of each server, with one GPU for each rank"
    )
    parser.add_argument(
        "--drift", action="store_true", help="let the prefix tiers of ranks hold different pages"
    )
    parser.add_argument("--int8", action="store_true", help="check two servers with int8, too")
    parser.add_argument("--codec", default="uniform4")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--logs", type=Path, default=ROOT / ".kvspec" / "check_prefix_tiers")
    parser.add_argument("--commit", default="", help="commit to record (default: what git reports)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.drift and (args.int8 or args.ranks == 1):
        parser.error(
            f"--drift needs --ranks of at least 2 and no --int8, got --ranks={args.ranks}: lost "
            "pages are computed again, which may change int8 answers"
        )
    return args


def run(
    args: argparse.Namespace,
    check: Check,
    scratch: Path,
    environment: dict[str, str],
    address: str,
) -> None:
    exact = () if args.cpu else ("--enable-deterministic-inference",)
    int8 = ("--kvspec-target=int8", "--kvspec-draft-len=8")
    disk = f"--kvspec-prefix-dir={scratch / 'disk'}"
    wait = "--kvspec-prefix-wait-ms=20000"
    shared = (f"--kvspec-prefix-server={address}", wait)
    host = "--kvspec-prefix-host-gb=1"

    def server(name: str, pool: int, *arguments: str, **more: str) -> TierServer:
        return TierServer(
            name,
            (
                f"--model-path={args.model}",
                f"--kvspec-codec={args.codec}",
                f"--tp-size={args.ranks}",
                *arguments,
            ),
            pool,
            on_gpu=not args.cpu,
            log_path=args.logs / f"{name.replace(' ', '_')}.log",
            environment=environment | more,
        )

    with ExitStack() as running:
        start(
            running,
            plain := server("no tiers", LARGE_POOL, *exact),
            tiers := server(
                "tiers", SMALL_POOL, *exact, host, disk, *shared, "--kvspec-prefix-publish-gbps=10"
            ),
            *(others := int8_servers(server, *int8, host) if args.int8 else ()),
        )
        expected = check.ask(plain, at_once=True)
        check.same("exact.no_tiers_again", check.ask(plain, at_once=False), expected)
        tiers.wait_until_live()
        check.same("exact.cold", check.ask(tiers, at_once=True), expected)
        check.same("exact.again", check.ask(tiers, at_once=False), expected)
        last = tiers.ask(check.prompts[-1:], check.new_tokens, at_once=False)
        check.same("exact.last_again", last, expected[-1:])
        check.same("exact.all_at_once", check.ask(tiers, at_once=True), expected)
        check.hits("exact", tiers, "resident", "host")
        tiers.wait_until_spilled()
        expected_int8 = compare_int8(check, *others) if others else []
    fresh = {
        "disk": server("disk", LARGE_POOL, *exact, disk),
        "remote": server("remote", LARGE_POOL, *exact, *shared),
    }
    paths = f"{FAULTS}:{environment['PYTHONPATH']}"
    small_cache = (("PYTHONPATH", paths), ("KVSPEC_CACHE_PAGES", str(CACHE_PAGES)))
    if args.hosted:
        fresh["host"] = server(
            "hosted",
            SMALL_POOL,
            *(*exact, host, "--kvspec-host-gb=1"),
            **dict(small_cache),
        )
    with ExitStack() as running:
        slow_link = Proxy(address)
        running.callback(slow_link.close)
        behind = (f"--kvspec-prefix-server={slow_link.address}", wait)
        early = server("early", LARGE_POOL, *exact, *behind)
        start(running, *fresh.values(), early)
        fresh["remote"].wait_until_live()
        for tier, one in fresh.items():
            name = "hosted" if tier == "host" else f"fresh.{tier}"
            check.same(f"exact.{name}", check.ask(one, at_once=False), expected)
            check.same(f"exact.{name}.all_at_once", check.ask(one, at_once=True), expected)
            check.hits(f"exact.{name}", one, tier)
        slow_link.bytes_per_s = SLOW_BYTES_PER_S
        compare_early(check, early, expected)
        if args.hosted:
            pages = fresh["host"].report()["pools"]
            in_use = (pages["residual_store_pages"], pages["residual_cache_pages"])
            assert in_use == (SMALL_POOL // 64, CACHE_PAGES), (
                f"wrong sizes of residual store or cache: {pages}"
            )
    if args.kept:
        cases = {"exact.kept": KeptCase(exact, expected, host_gb=0.03)}
        if args.hosted:
            arguments = (*exact, "--kvspec-host-gb=1")
            cases["exact.kept_hosted"] = KeptCase(
                arguments, expected, host_gb=0.03, environment=small_cache
            )
        if args.int8:
            cases["int8.kept"] = KeptCase(int8, expected_int8, host_gb=0.01, is_deterministic=False)
        check_kept_anchors(check, server, start, cases, SMALL_POOL, scratch)


def compare_early(check: Check, server: TierServer, expected: list[list[int]]) -> None:
    """Check answers of requests that start on anchors, one at a time and all at once."""
    for name, at_once in (("exact.early", False), ("exact.early.all_at_once", True)):
        server.flush()
        server.wait_until_live()
        before = server.remote_counters()
        check.same(name, check.ask(server, at_once=at_once), expected)
        now = server.remote_counters()
        for counter, unit in (("early", "requests"), ("drafts_on_anchors", "tokens")):
            num = now[counter] - before[counter]
            check.note(f"{name}.{counter}", num, unit, None, num == 0)
        check.note(f"{name}.returned", now["returned"] - before["returned"], "requests", 0, False)


def int8_servers(make, *arguments: str) -> tuple[TierServer, TierServer]:
    *target, host = arguments
    return (
        make("int8 no tiers", LARGE_POOL, *target),
        make("int8 tiers", SMALL_POOL, *target, host),
    )


def compare_int8(check: Check, plain: TierServer, tiers: TierServer) -> list[list[int]]:
    """Compare answers over cached prefixes, and return them."""
    for server in (plain, tiers):
        check.ask(server, at_once=False)
    expected = check.ask(plain, at_once=False)
    check.same("int8.again", check.ask(tiers, at_once=False), expected)
    check.hits("int8", tiers, "host")
    return expected


def start(running: ExitStack, *servers: TierServer) -> None:
    """Start all servers at once, and wait until all are healthy. Servers stop when `running`
    closes."""
    begin = time.monotonic()
    for server in servers:
        running.enter_context(server)
    for server in servers:
        server.wait_healthy()
    names = ", ".join(server.name for server in servers)
    console.print(f"servers healthy after {time.monotonic() - begin:.0f} s: {names}")


if __name__ == "__main__":
    main()
