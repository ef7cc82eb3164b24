"""Measure the time to the k-th token (TTKT) on a decode server, by transfer mode.

    python benchmarks/bench_ttkt.py [--lengths 4096 ...] [--seconds 0.5 1 2 5] [--modes split ...]
    python benchmarks/bench_ttkt.py --gpus 1 --out benchmarks/results/ttkt_h200.json

A prefill and a decode server run on this machine's CPU, or on one of its GPUs. The link between
them is loopback, with a speed at which the prompt's full KV takes the given --seconds. The prefill
server has all pages of a prompt cached but the last. Time begins when the last page is computed;
KV is packed and sent from then on. The time of a token is when the token was computed, if it was
kept (TTKT, Lynx section 6). A second figure is when the client received the token. With --gpus,
all pairs start at once and share the GPUs; pairs on one GPU are measured one after the other.
Every point is appended to OUT.points.jsonl beside the results. A run measures the points that are
not in that file yet. With no mode to measure, it only draws. The mode `packed` is `split` with
packed residuals, and needs GPUs: servers on a CPU compute in fp32.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from acceptance.prompts import cut_prompts
from acceptance.report import write_json
from rich.console import Console
from serving import machine
from transformers import AutoConfig
from ttkt.disaggregated_requests import ask
from ttkt.figures import MODES, draw, figures, table
from ttkt.points import TOKENS, Point, append_point, read_points
from ttkt.servers import CPU, GPU, NO_LIMIT_GBPS, LinkedPair, Platform, Setup, running

ROOT = Path(__file__).resolve().parent
MODEL = ROOT.parent.parent / "shared" / "models" / "eval-31m"
# Tokens that the longest prompts leave free for the answer.
ROOM = 128

# Prompt length, number of the prompt, and seconds that the link takes for its full KV.
Wanted = tuple[int, int, float]

console = Console(width=120)
_points_file = threading.Lock()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.5, 1, 2, 5])
    parser.add_argument("--modes", nargs="*", choices=MODES, help="default: all that can run")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each length")
    parser.add_argument(
        "--gpus", type=int, default=0, help="GPUs that the servers share; 0 runs them on the CPU"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "ttkt.json")
    parser.add_argument(
        "--prefixes",
        type=Path,
        help="on a CPU: folder that keeps computed prompts for later runs (default: a temporary "
        "folder)",
    )
    parser.add_argument("--server-args", default="", help="further flags of every server")
    parser.add_argument("--logs", type=Path, default=Path(".kvspec/ttkt"))
    parser.add_argument("--commit", help="commit of the points (default: of this checkout)")
    parser.add_argument("--machine", help="machine of the points (default: this machine)")
    args = parser.parse_args()
    if args.modes is None:
        args.modes = [mode for mode in MODES if args.gpus or mode != "packed"]
    elif "packed" in args.modes and not args.gpus:
        parser.error("--modes packed needs --gpus: packed residuals need a KV cache in bf16")
    return args


def main() -> None:
    args = parse()
    path = args.out.with_suffix(".points.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {(p.mode, *p.key) for p in read_points(path)} if path.exists() else set()
    wanted = {mode: missing(args, mode, known) for mode in args.modes}
    wanted = {mode: points for mode, points in wanted.items() if points}
    platform = GPU if args.gpus else CPU
    prompts = {
        length: cut_prompts(args.model, args.prompts, _prompt_len(args.model, length))[0]
        for length in {length for points in wanted.values() for length, _, _ in points}
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        # A prefill on a CPU takes minutes, so each pair reads the prefixes that earlier pairs
        # computed.
        prefixes = None if args.gpus else args.prefixes or folder
        setup = Setup(
            platform=platform,
            model=args.model,
            num_tokens=args.prompts * sum(args.lengths),
            logs=args.logs,
            scratch=folder,
            prefixes=prefixes,
            server_args=shlex.split(args.server_args),
        )
        # On a CPU, modes run one after the other: servers would slow each other down.
        groups = [list(wanted)] if args.gpus else [[mode] for mode in wanted]
        for modes in filter(None, groups):
            measure_all(setup, modes, wanted, prompts, range(args.gpus) or [None], path)
    points = read_points(path)
    console.print(table(points))
    found = figures(points)
    for figure in found:
        goal = "" if figure.baseline is None else f", goal {figure.baseline}"
        console.print(f"{figure.name} {figure.value:.3f} {figure.unit}{goal}")
    settings = {
        "model": args.model.name,
        "dtype": platform.dtype,
        "lengths": sorted({p.prompt_len for p in points}),
        "seconds_of_full": sorted({p.full_s for p in points}),
        "prompts": len({p.prompt for p in points}),
        "draft_len": "auto for split, otherwise 0",
        "codec": "uniform4",
        "target": "exact",
        "server_args": " ".join([*platform.arguments, *setup.server_args]),
        "ratios": "ratios of the times from the end of the prefill until kept tokens were computed",
    }
    names = machine.gpu_names()
    where = args.machine or (names[0] if args.gpus and names else None)
    device = torch.device("cpu")
    write_json(args.out, "bench_ttkt", device, settings, found, machine=where, commit=args.commit)
    draw(args.out.with_suffix(".png"), points)


def missing(args: argparse.Namespace, mode: str, known: set) -> list[Wanted]:
    """Return the points that are not in the file yet."""
    return [
        (length, prompt, full_s)
        for length in args.lengths
        for prompt in range(args.prompts)
        for full_s in args.seconds
        if (mode, length, prompt, full_s) not in known
    ]


def measure_all(
    setup: Setup,
    modes: Sequence[str],
    wanted: dict[str, list[Wanted]],
    prompts: dict[int, torch.Tensor],
    gpus: Sequence[int | None],
    path: Path,
) -> None:
    """Measure and append all points of these modes. All GPUs work at once; the pairs on one GPU
    take turns. prompts: by length, [num_prompts, num_tokens]."""
    begun = time.perf_counter()
    with running(setup, modes, gpus) as pairs:
        console.print(f"{2 * len(pairs)} servers healthy after {time.perf_counter() - begun:.0f} s")

        def on(gpu: int | None) -> None:
            for pair in pairs:
                if pair.gpu == gpu:
                    measure(setup, pair, wanted[pair.mode], prompts, path)

        with ThreadPoolExecutor(len(gpus)) as pool:
            list(pool.map(on, gpus))


def measure(
    setup: Setup,
    linked: LinkedPair,
    wanted: Sequence[Wanted],
    prompts: dict[int, torch.Tensor],
    path: Path,
) -> None:
    """Measure and append a point for each (length, prompt, seconds) of `wanted`."""
    begun = time.perf_counter()
    linked.set_link(NO_LIMIT_GBPS)
    for length, prompt in sorted({(length, prompt) for length, prompt, _ in wanted}):
        ask(linked.pair, prompts[length][prompt].tolist(), setup.platform.warm_up_tokens)
    console.print(f"{linked.mode}: prompts computed in {time.perf_counter() - begun:.0f} s")
    for length, prompt, full_s in wanted:
        tokens = prompts[length][prompt].tolist()
        linked.set_link(len(tokens) * kv_bytes(setup.model, setup.platform) / full_s / 1e9)
        answer = ask(linked.pair, tokens, max(TOKENS))
        with _points_file:
            append_point(path, Point.of(answer, linked.mode, length, prompt, full_s))
    console.print(f"{linked.mode}: measured in {time.perf_counter() - begun:.0f} s")


def kv_bytes(model: Path, platform: Platform) -> int:
    """Return the KV bytes of a token."""
    config = AutoConfig.from_pretrained(model)
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return int(numbers * platform.itemsize)


def _prompt_len(model: Path, length: int) -> int:
    """Return the tokens of a prompt of nominal `length`, at most what leaves ROOM for an answer."""
    longest = int(AutoConfig.from_pretrained(model).max_position_embeddings)
    return min(length, longest - ROOM)


if __name__ == "__main__":
    main()
