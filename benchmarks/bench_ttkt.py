"""How soon does a decode server have the k-th token, by how KV crosses to it?

    python benchmarks/bench_ttkt.py [--lengths 4096 ...] [--seconds 0.5 1 2 5] [--modes split ...]

A prefill and a decode server on this machine's CPU, joined by loopback at speeds at which the
prompt's KV in full takes the given seconds. Prompts are cached on the prefill server, so that KV
leaves as soon as the request is there. Token times are those of when a token was computed, if it
was kept (TTKT, Lynx section 6); beside them, when a client had it. Every point is kept in
--points; a run goes on where the file ends, and with no mode to measure it only draws.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from acceptance.prompts import cut_prompts
from acceptance.report import write_json
from rich.console import Console
from rich.progress import track
from transformers import AutoConfig
from ttkt.figures import MODES, draw, figures, table
from ttkt.points import TOKENS, Point, append_point, read_points
from ttkt.requests_apart import ask

from sglang_kvspec.testing.server_pair import ServerPair
from sglang_kvspec.testing.server_process import CPU_ARGUMENTS

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
MODEL = ROOT.parent.parent / "shared" / "models" / "eval-31m"
# Faster than any loopback: nothing is held back.
NO_LIMIT_GBPS = 1000.0
START_TIMEOUT_S = 600.0
PAGE_SIZE = 64
# Of the longest prompts that the model takes, room for the answer.
ROOM = 128

console = Console(width=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.5, 1, 2, 5])
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--prompts", type=int, default=2, help="of each length")
    parser.add_argument("--points", type=Path, default=RESULTS / "ttkt.points.jsonl")
    parser.add_argument("--prefixes", type=Path, help="folder that keeps computed prompts")
    parser.add_argument("--logs", type=Path, default=Path(".kvspec/ttkt"))
    parser.add_argument("--commit", help="that the points were measured at, if not here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    known = {(p.mode, *p.key) for p in read_points(args.points)} if args.points.exists() else set()
    args.points.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        prefixes = args.prefixes or Path(scratch)
        for mode in args.modes:
            missing = [
                (length, prompt, full_s)
                for length in args.lengths
                for prompt in range(args.prompts)
                for full_s in args.seconds
                if (mode, length, prompt, full_s) not in known
            ]
            if missing:
                measure(args, mode, missing, prefixes)
    points = read_points(args.points)
    console.print(table(points))
    found = figures(points)
    for figure in found:
        console.print(f"{figure.name} {figure.value:.3f} {figure.unit}, goal {figure.baseline}")
    settings = {
        "model": args.model.name,
        "dtype": "float32",
        "lengths": sorted({p.prompt_len for p in points}),
        "seconds_of_full": sorted({p.full_s for p in points}),
        "prompts": args.prompts,
        "draft_len": "auto for split, otherwise 0",
        "codec": "uniform4",
        "target": "exact",
        "ratios": "of times at which kept tokens were computed, since the prefill ended",
    }
    device = torch.device("cpu")
    write_json(RESULTS / "ttkt.json", "bench_ttkt", device, settings, found, commit=args.commit)
    draw(RESULTS / "ttkt.png", points)


def measure(
    args: argparse.Namespace,
    mode: str,
    wanted: Sequence[tuple[int, int, float]],
    prefixes: Path,
) -> None:
    """Append a point for each (length, prompt, seconds)."""
    prompts = {
        length: cut_prompts(args.model, args.prompts, _prompt_len(length))[0].tolist()
        for length in sorted({length for length, _, _ in wanted})
    }
    link = prefixes / "link.gbps"
    with running(args, mode, prefixes, link) as pair:
        asked = sorted({(length, prompt) for length, prompt, _ in wanted})
        for length, prompt in track(asked, f"{mode}: prompts", console=console):
            ask(pair, prompts[length][prompt], 2)
        for length, prompt, full_s in track(wanted, f"{mode}: links", console=console):
            tokens = prompts[length][prompt]
            set_link(link, len(tokens) * kv_bytes(args.model) / full_s / 1e9)
            answer = ask(pair, tokens, max(TOKENS))
            append_point(args.points, Point.of(answer, mode, length, prompt, full_s))


@contextmanager
def running(
    args: argparse.Namespace, mode: str, prefixes: Path, link: Path
) -> Iterator[ServerPair]:
    num_tokens = args.prompts * sum(args.lengths) + 4096
    set_link(link, NO_LIMIT_GBPS)
    # What is not split is decoded plainly, as by servers without anchors.
    draft_len = "auto" if mode == "split" else 0
    pair = ServerPair(
        (
            *CPU_ARGUMENTS,
            f"--model-path={args.model}",
            f"--max-total-tokens={num_tokens // PAGE_SIZE * PAGE_SIZE}",
            "--mem-fraction-static=0.3",
            "--max-running-requests=4",
            "--kvspec",
            f"--kvspec-transfer={mode}",
            f"--kvspec-draft-len={draft_len}",
        ),
        log_folder=args.logs / mode,
        prefill=(
            f"--kvspec-link-gbps={NO_LIMIT_GBPS}",
            f"--kvspec-prefix-dir={prefixes / 'store'}",
        ),
        environment={
            "PYTHONPATH": str(ROOT / "ttkt" / "link_control"),
            "KVSPEC_LINK_FILE": str(link),
        },
    )
    with pair, console.status(f"{mode}: two servers start"):
        pair.wait_healthy(START_TIMEOUT_S)
        yield pair


def set_link(path: Path, gbps: float) -> None:
    # The server may read it at any moment.
    draft = path.with_suffix(".new")
    draft.write_text(repr(gbps), encoding="ascii")
    draft.replace(path)


def kv_bytes(model: Path) -> int:
    """Of a token, in float32."""
    config = AutoConfig.from_pretrained(model)
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def _prompt_len(length: int) -> int:
    return length - ROOM if length >= 32768 else length


if __name__ == "__main__":
    main()
