"""Count the calls and the changes of file in one steady round of the scheduler's worker.

    python benchmarks/trace_round.py --tree PATH [--out PATH] [--calls PATH]
    python benchmarks/trace_round.py --before PATH --after PATH [--out PATH]

PATH is a checkout (for example of `git worktree add`). The tool starts a server with the code of
that checkout on the CPU, with the schedule `rounds`. It traces calls of the scheduler's
`model_worker.forward_batch_generation` with sys.setprofile. Every figure is the median over rounds,
and its spread is half the distance between the quartiles. With --before and --after, two more
figures are the ratios of the two checkouts: engine.round.calls_vs_before and
engine.round.file_changes_vs_before.

Definitions:

- A function is ours if its file lies below sglang_kvspec/, kernels/kvspec_kernels/ or
  patches/kvspec_patches/. Nothing is excluded by name.
- A call is a Python frame of one of our functions that begins below another frame of ours. Methods,
  properties, lambdas, comprehensions (frames of their own up to Python 3.11) and every resumption
  of a generator count alike. Code in C has no frames, and methods that dataclasses generate have no
  file: neither counts.
- The caller is the innermost of our functions on the stack. SGLang, torch or the standard library
  may lie between (a decorator, contextlib, a hook). `direct_calls` leaves these calls out.
- `edges` are distinct pairs of caller and callee.
- `file_changes` takes the called functions in the order of their calls, beginning with the worker's
  own, and counts neighbours in different files. Returns are not in the sequence.
- `files` are the distinct files of the called functions.

Calls below the forward of SGLang's model (attention, once a layer) are counted as
engine.round.model.*, and not in the other figures. The round has a fixed number of requests and
drafts and moves no residuals, so that counts do not depend on measured times.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from acceptance.report import Figure, write_json
from rich.console import Console
from rich.table import Table
from round_trace.counts import (
    Round,
    call_tree,
    half_quartile_range,
    median_round,
    over_rounds,
)
from round_trace.traced_server import Load, trace_rounds

ROOT = Path(__file__).resolve().parents[1]
RATIOS = ("calls", "file_changes")

console = Console(width=120)


@dataclass(frozen=True, slots=True)
class Traced:
    """Rounds of one checkout."""

    commit: str
    rounds: tuple[Round, ...]

    def medians(self) -> dict[str, float]:
        return self._figures(median)

    def spreads(self) -> dict[str, float]:
        return self._figures(half_quartile_range)

    def _figures(self, statistic: Callable[[Sequence[float]], float]) -> dict[str, float]:
        """Return statistics of the counts by name, without the prefix engine.round."""
        outside, model = (
            asdict(over_rounds(self.rounds, part, statistic))
            for part in (Round.outside_model, Round.inside_model)
        )
        forwards = statistic([one.model_forwards for one in self.rounds])
        inside = {f"model.{name}": value for name, value in model.items()}
        return outside | inside | {"model.forwards": forwards}


def main() -> None:
    args = parse_arguments()
    load = Load(
        model=args.model.resolve(),
        requests=args.requests,
        draft_len=args.draft_len,
        new_tokens=args.new_tokens,
        warm_up=args.warm_up,
        rounds=args.rounds,
    )
    before = None if args.before is None else trace(args.before, load)
    traced = trace(args.after or args.tree, load, args.calls)
    figures = figures_of(traced, before)
    show(figures)
    settings = asdict(load) | {
        "model": load.model.name,
        "commit": traced.commit,
        "commit_before": None if before is None else before.commit,
        "server": " ".join(
            flag for flag in load.server_arguments() if not flag.startswith("--model-path=")
        ),
        "counted": "calls between KVSpec's functions outside the model's forward (trace_round.py)",
    }
    if args.out is not None:
        write_json(args.out, "trace_round", torch.device("cpu"), settings, figures)
        console.print(f"written: {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, help="checkout to trace")
    parser.add_argument("--before", type=Path, help="checkout that --after is compared with")
    parser.add_argument("--after", type=Path, help="checkout to compare with --before")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--calls", type=Path, help="text file for the calls of a median round")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo-5m")
    parser.add_argument("--requests", type=int, default=4, help="number of running requests")
    parser.add_argument(
        "--draft-len", type=int, default=4, help="drafts of each request in a round"
    )
    parser.add_argument("--new-tokens", type=int, default=512, help="tokens of each request")
    parser.add_argument("--warm-up", type=int, default=16, help="rounds before tracing begins")
    parser.add_argument("--rounds", type=int, default=64, help="rounds to trace")
    args = parser.parse_args()
    if (args.before is None) != (args.after is None) or (args.tree is None) == (args.after is None):
        parser.error("give either --tree, or --before and --after")
    return args


def trace(tree: Path, load: Load, calls: Path | None = None) -> Traced:
    """Trace one checkout. calls: file for the calls of its median round."""
    tree = tree.resolve()
    console.print(f"tracing {load.rounds} rounds of {tree}")
    with tempfile.TemporaryDirectory() as folder:
        rounds = trace_rounds(tree, load, Path(folder))
    if calls is not None:
        calls.write_text(call_tree(median_round(rounds)), encoding="utf-8")
    return Traced(commit_of(tree), tuple(rounds))


def figures_of(traced: Traced, before: Traced | None) -> list[Figure]:
    """Return the figures of one checkout, with those of `before` as baselines, and the ratios of
    the two."""
    old = {} if before is None else before.medians()
    new, spreads = traced.medians(), traced.spreads()
    ratios = [
        Figure(f"engine.round.{name}_vs_before", new[name] / old[name], "x before", baseline=1)
        for name in (RATIOS if old else ())
    ]
    counts = [
        Figure(f"engine.round.{name}", value, "a round", spreads[name], old.get(name))
        for name, value in new.items()
    ]
    return [*ratios, *counts]


def show(figures: list[Figure]) -> None:
    table = Table(title="one steady round, median")
    for column in ("figure", "value", "spread", "before"):
        table.add_column(column)
    for figure in figures:
        before = "" if figure.baseline is None else f"{figure.baseline:g}"
        spread = "" if figure.spread is None else f"{figure.spread:g}"
        table.add_row(figure.name, f"{figure.value:.4g}", spread, before)
    console.print(table)


def commit_of(tree: Path) -> str:
    """Return the hash of the checkout's commit, ending in -dirty if files differ from the
    commit."""
    asked = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    done = subprocess.run(asked, cwd=tree, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
