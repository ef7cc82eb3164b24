"""Check that a prefill and a decode server on one GPU, or one per rank, answer like one server.

usage: python benchmarks/check_disaggregation_gpu.py [--out PATH] [--link-gbps X]
       python benchmarks/check_disaggregation_gpu.py --server-args "--kvspec-host-gb=1"
       python benchmarks/check_disaggregation_gpu.py --server-args "--tp-size=2"
       python benchmarks/check_disaggregation_gpu.py --cpu --prompts 6 --longest 1500

Three servers start at once: the pair, over a link so slow that residuals arrive after several
drafts, and a single server with the same flags. All run with --enable-deterministic-inference, so
answers must agree in every token. Prompts are sent one at a time, then eight at a time. With --cpu,
servers use the schedule `rounds`, as GPU servers do, and float32. Exits with 1 if an answer
differs, a request fails, no draft came before residuals, or pages are left in use.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import torch
from acceptance.prompts import cut_prompts, even_lengths
from acceptance.report import Estimate, Figure, write_json
from rich.console import Console
from serving.environment import server_environment
from serving.live_server import kvspec_of
from ttkt.disaggregated_requests import TIMEOUT_S, Answer, ask

from kvspec_testkit.servers.server_pair import ServerPair
from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess
from kvspec_testkit.servers.transfer_report import Transfer, read_transfer_report

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 300.0
SETTLE_TIMEOUT_S = 20.0
AT_ONCE = 8
PREFIX = "apart.gpu"
# Three servers share the memory, so each gets a small part. A server that starts also counts what
# the others allocate meanwhile as its own. The tokens of ARGUMENTS still fit.
GPU_ARGUMENTS = (
    "--dtype=bfloat16",
    "--mem-fraction-static=0.2",
    "--sampling-backend=pytorch",
    "--random-seed=0",
    "--enable-deterministic-inference",
)
ARGUMENTS = (
    "--kvspec",
    "--max-total-tokens=65536",
    "--max-running-requests=16",
    "--grammar-backend=none",
)

console = Console(width=110)


def main() -> None:
    args = parse_arguments()
    prompts = mixed_prompts(args.model, args.prompts, args.shortest, args.longest)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, running(args, Path(scratch)) as (pair, single):
        console.print(f"three servers healthy after {time.perf_counter() - begun:.0f} s")
        expected = [ask_single(single, prompt, args.new_tokens) for prompt in prompts]
        console.print("the single server has answered all prompts")
        alone = ask_pair(pair, prompts, args.new_tokens, 1)
        together = ask_pair(pair, prompts, args.new_tokens, AT_ONCE)
        left = pages_left(pair)
        drafts_on_anchors = kvspec_report(pair.decode)["transfer"]["drafts_on_anchors"]
    found = [
        *compare("alone", alone, expected),
        *compare("eight_at_once", together, expected),
        Figure(f"{PREFIX}.pages_left", left, "pages", None, 0),
        Figure(f"{PREFIX}.drafts_on_anchors", drafts_on_anchors, "drafts"),
    ]
    for figure in found:
        console.print(f"{figure.name}: {figure.value:.4g} {figure.unit}")
    if args.out is not None:
        settings = {
            "model": args.model.name,
            "prompts": len(prompts),
            "prompt_tokens": f"{min(map(len, prompts))} to {max(map(len, prompts))}",
            "new_tokens": args.new_tokens,
            "link_gbps": args.link_gbps,
            "server_args": args.server_args,
            "deterministic": not args.cpu,
        }
        device = torch.device("cpu" if args.cpu else "cuda")
        write_json(args.out, "check_disaggregation_gpu", device, settings, found)
    wrong = sum(f.value for f in found if f.baseline == 0) + (drafts_on_anchors == 0)
    console.print("all checks passed" if wrong == 0 else "some checks FAILED")
    sys.exit(wrong > 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo-5m")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--shortest", type=int, default=200, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument(
        "--link-gbps",
        type=float,
        help="bandwidth of the link in GB/s (default: 0.03; with --cpu: 0.006)",
    )
    parser.add_argument("--server-args", default="", help="further flags of every server")
    parser.add_argument("--logs", type=Path, default=Path(".kvspec/check_disaggregation"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.link_gbps is None:
        args.link_gbps = 0.006 if args.cpu else 0.03
    return args


def mixed_prompts(model: Path, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Return prompts with lengths in even steps, long and short ones mixed."""
    windows, _ = cut_prompts(model, count, longest)
    lengths = even_lengths(count, shortest, longest)
    mixed = [lengths[i * 7 % count] for i in range(count)] if count % 7 else lengths
    return [w[:n] for w, n in zip(windows.tolist(), mixed, strict=True)]


@contextmanager
def running(args: argparse.Namespace, scratch: Path) -> Iterator[tuple[ServerPair, ServerProcess]]:
    platform = CPU_ARGUMENTS if args.cpu else GPU_ARGUMENTS
    model = f"--model-path={args.model}"
    arguments = (model, *platform, *ARGUMENTS, *shlex.split(args.server_args))
    environment = server_environment(scratch, None)
    rounds = ("--kvspec-schedule=rounds",) if args.cpu else ()
    pair = ServerPair(
        arguments,
        log_folder=args.logs,
        prefill=(f"--kvspec-link-gbps={args.link_gbps}",),
        decode=rounds,
        environment=environment,
    )
    single = ServerProcess(
        (*arguments, *rounds), log_path=args.logs / "single.log", environment=environment
    )
    try:
        single.start()
        with pair:
            pair.wait_healthy(START_TIMEOUT_S)
            single.wait_healthy(START_TIMEOUT_S)
            yield pair, single
    finally:
        single.stop()


def ask_single(server: ServerProcess, prompt: list[int], new_tokens: int) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params}
    reply = requests.post(f"{server.base_url}/generate", json=body, timeout=TIMEOUT_S)
    reply.raise_for_status()
    tokens: list[int] = reply.json()["output_ids"]
    return tokens


def ask_pair(
    pair: ServerPair, prompts: Sequence[list[int]], new_tokens: int, at_once: int
) -> list[Answer]:
    """Flush the prefill server's prefix cache, then send all prompts, `at_once` at a time."""
    requests.post(
        f"{pair.prefill.base_url}/flush_cache?timeout=30", timeout=TIMEOUT_S
    ).raise_for_status()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda prompt: ask(pair, prompt, new_tokens), prompts))
    console.print(f"the pair has answered all prompts, {at_once} at a time")
    return answers


def compare(name: str, answers: Sequence[Answer], expected: Sequence[list[int]]) -> list[Figure]:
    """Return the number of answers that differ, the drafts before residuals, and transfer times."""
    differ = 0
    for index, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        pairs = enumerate(zip(answer.output_ids, wanted, strict=True))
        place = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if place is not None:
            differ += 1
            console.print(f"{name}: prompt {index} differs from token {place} on")
    transfers = [read_transfer_report(answer.meta).transfer for answer in answers]
    early = [transfer.drafts_before_residuals for transfer in transfers]
    begin = f"{PREFIX}.{name}"
    return [
        Figure(f"{begin}.mismatches", differ, f"of {len(answers)} answers", None, 0),
        Figure(f"{begin}.early_drafts.answers", sum(n > 0 for n in early), "answers"),
        Figure(f"{begin}.early_drafts.median", statistics.median(early), "drafts an answer"),
        Figure(
            f"{begin}.early_drafts.kept",
            sum(transfer.kept_before_residuals for transfer in transfers) / max(sum(early), 1),
            "of the early drafts",
        ),
        *(_seconds(begin, stream, transfers) for stream in ("anchors", "residuals")),
        _seconds(begin, "first_verification", transfers),
    ]


def _seconds(begin: str, what: str, transfers: Sequence[Transfer]) -> Figure:
    """Return the mean milliseconds from the end of a prefill until `what`."""
    times = [getattr(transfer.seconds, what) for transfer in transfers]
    mean = Estimate.of(torch.tensor([at for at in times if at is not None] or [0.0]))
    return Figure(f"{begin}.ms_to_{what}", 1e3 * mean.mean, "ms", 1e3 * mean.half_width)


def pages_left(pair: ServerPair) -> int:
    """Return the pages in use on the decode server, which keeps no prefixes. Wait up to
    SETTLE_TIMEOUT_S until none is in use."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        report = kvspec_report(pair.decode)
        states, pools = report["page_states"], report["pools"]
        left = sum(count for state, count in states.items() if state != "ABSENT")
        left += int(pools["window_pages_used"])
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def kvspec_report(server: ServerProcess) -> dict[str, Any]:
    reply = requests.get(f"{server.base_url}/server_info", timeout=TIMEOUT_S)
    reply.raise_for_status()
    return kvspec_of(reply.json())


if __name__ == "__main__":
    main()
