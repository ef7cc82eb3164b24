"""Measure how many drafts are accepted when they read only some pages, round by round.

Whole requests: the target decodes greedily, and each view drafts behind what the target has
emitted, in rounds that begin again behind the first rejection. The record has the accept lengths of
every request in order, which bench_serving.py can replay.

usage: python benchmarks/bench_views.py [MODEL] [--length 16384] [--prompts 60] [--out PATH]

--weights: weights that drafts read, and nothing else. own_text: in 4 bits, as a server with
--kvspec-draft-weights int4 has them, the vocabulary projection included.

--at-every-token: begin a round at every token, and record how sure drafts were. From these rounds
bench_draft_lengths.py can put together those of any draft lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from acceptance import report
from acceptance.draft_weights import KINDS, rounded_projection, with_projection, with_weights
from acceptance.drafting import TargetRun, target_run, through_anchor
from acceptance.model import Llama
from acceptance.prompts import TEXTS, cut_prompts
from acceptance.recall import recalls
from acceptance.report import Estimate, Figure
from acceptance.rounds import DraftCaches, Rounds, run_rounds, run_rounds_at_every_token
from acceptance.view_reads import ViewReads
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_kvspec.codecs import make_codec
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.seams import DRAFT_VIEWS
from sglang_kvspec.runtime.budget_views import DEFAULT_BUDGET
from sglang_kvspec.runtime.draft_view import DraftView, ViewShape

ROOT = Path(__file__).resolve().parents[1]
PAGE_SIZE = 64
# Ages of a choice, in tokens: refreshed at each step, and as old as a round of 12 drafts.
RECALL_AGES = (1, 12)
# Rounds of several requests by `view` or `view:budget`.
Results = dict[str, list[Rounds]]


def main() -> None:
    args = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Llama(args.model, device)
    prompts, sources = cut_prompts(args.model, args.prompts, args.length, args.seed, args.text)
    results, recall = measure(model, prompts, args)
    settings = {
        "model": args.model.name,
        "prompts": args.prompts,
        "prompt_len": args.length,
        "new_tokens": args.new_tokens,
        "draft_len": args.draft_len,
        "prompts_from": sources,
        "seed": args.seed,
        "page_size": PAGE_SIZE,
        "weights": args.weights,
        "at_every_token": args.at_every_token,
        "spread": "95% half width over requests",
        "recall_budget": args.recall_budget,
        "raw": {name: [asdict(each) for each in rounds] for name, rounds in results.items()},
        "raw_recall": recall,
    }
    figures = figures_of(results, args.draft_len) + recall_figures(recall)
    report.write_json(args.out, "views", device, settings, figures, commit=args.commit)
    print_results(results, args.draft_len)
    for figure in recall_figures(recall):
        Console().print(f"{figure.name}: {figure.value:.3f}")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_runs(__doc__, length=16384, new_tokens=256)
    add = parser.add_argument
    add(
        "--views",
        nargs="+",
        default=["all", "pages:0.05", "pages:0.1", "pages:0.2", "recent:0.1"],
        metavar="VIEW[:BUDGET[:QUERIES]]",
        help="views to compare. QUERIES: verified queries that a view chooses by",
    )
    add("--weights", choices=KINDS, default="target", help="weights that drafts read")
    add("--at-every-token", action="store_true", help="begin a round at every token")
    add("--recall-budget", type=float, default=0.1, help="share of pages of the recall; 0: none")
    args = parse_run(parser)
    if args.at_every_token and args.views != ["all"]:
        parser.error(f"--at-every-token needs --views all, got {' '.join(args.views)}")
    return args


def parser_of_runs(description: str, *, length: int, new_tokens: int) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark that drafts behind target runs. length,
    new_tokens: defaults."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    default_model = ROOT.parent / "shared" / "models" / "eval-31m"
    add = parser.add_argument
    add("model", type=Path, nargs="?", default=default_model, help="folder of a model")
    add("--prompts", type=int, default=60)
    add("--length", type=int, default=length, help="tokens per prompt, a multiple of 64")
    add("--new-tokens", type=int, default=new_tokens, help="tokens that the target decodes")
    add("--draft-len", type=int, default=16, help="drafts of each round")
    add("--text", choices=TEXTS, default="code", help="text of the prompts")
    add("--seed", type=int, default=0)
    add("--batch", type=int, default=4, help="requests whose caches are in memory at once")
    add("--commit", help="commit to record (default: what git reports)")
    add("--out", type=Path, required=True)
    return parser


def parse_run(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments. Exits if they make no sense."""
    args = parser.parse_args()
    if args.new_tokens <= args.draft_len or args.length % PAGE_SIZE:
        parser.error("--new-tokens must exceed --draft-len; --length must be a multiple of 64")
    return args


def measure(
    model: Llama, prompts: torch.Tensor, args: argparse.Namespace
) -> tuple[Results, list[dict[str, float]]]:
    """Return the rounds by view, and the recall by request."""
    results: Results = {name: [] for name in args.views}
    recall: list[dict[str, float]] = []
    batches = prompts.split(args.batch)
    drafter = with_weights(model, args.weights, args)
    if args.weights == "own_text":
        drafter = with_projection(drafter, rounded_projection(model, "nearest", args))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        task = progress.add_task("target run", total=len(batches) * (len(args.views) + 1))
        for batch in batches:
            progress.update(task, description="target run")
            run = target_run(model, batch, args.new_tokens, prefill_batch=1)
            progress.advance(task)
            for name in args.views:
                progress.update(task, description=name)
                results[name] += run_view(drafter, run, name, args)
                progress.advance(task)
            if args.recall_budget:
                progress.update(task, description="recall")
                caches = draft_caches(model, run)
                for row in range(len(batch)):
                    recall.append(recalls(run, caches, row, args.recall_budget, RECALL_AGES))
    return results, recall


def run_view(drafter: Llama, run: TargetRun, name: str, args: argparse.Namespace) -> list[Rounds]:
    caches = draft_caches(drafter, run)
    if args.at_every_token:
        return run_rounds_at_every_token(drafter, run, caches, args.draft_len)
    reads = ViewReads(drafter, run, caches, *make_view(name, drafter))
    return run_rounds(drafter, run, caches, reads, args.draft_len)


def draft_caches(model: Llama, run: TargetRun) -> DraftCaches:
    head_dim = model.shape.head_dim
    codec = make_codec(
        "uniform4", target="exact", page_size=PAGE_SIZE, head_dim=head_dim, dtype=torch.float32
    )
    return DraftCaches(run, through_anchor(codec), PAGE_SIZE)


def make_view(name: str, model: Llama) -> tuple[DraftView, float]:
    """Make the view of a name of --views. Return it, and its budget. Raises ConfigError."""
    view, asked, queries = [*name.split(":"), "", ""][:3]
    budget = float(asked) if asked else DEFAULT_BUDGET
    config = KVSpecConfig(draft_view=view, **({"draft_budget": budget} if asked else {}))
    shape = ViewShape(model.shape.num_layers, model.shape.num_kv_heads, 0, PAGE_SIZE)
    made: Any = DRAFT_VIEWS.load(view)(config, shape)
    if queries:
        made.num_queries = int(queries)
    return cast("DraftView", made), budget


def figures_of(results: Results, draft_len: int) -> list[Figure]:
    figures = []
    for name, rounds in results.items():
        label = name.replace(":", ".")
        accepted = mean_accepted(rounds)
        figures.append(
            Figure(
                f"views.{label}.mean_of_{draft_len}", accepted.mean, "tokens", accepted.half_width
            )
        )
        if "all" in results and name != "all":
            ratio = accepted.mean / mean_accepted(results["all"]).mean
            figures.append(Figure(f"views.{label}.vs_all", ratio, "x", baseline=1.0))
        for what in ("pages_read", "mass"):
            share = Estimate.of(torch.tensor([_mean(getattr(each, what)) for each in rounds]))
            figures.append(Figure(f"views.{label}.{what}", share.mean, "share", share.half_width))
    return figures


def recall_figures(recall: Sequence[dict[str, float]]) -> list[Figure]:
    figures = []
    for name in recall[0] if recall else ():
        found = Estimate.of(torch.tensor([each[name] for each in recall]))
        figures.append(Figure(f"recall.{name}", found.mean, "share", found.half_width))
    return figures


def mean_accepted(rounds: Sequence[Rounds]) -> Estimate:
    """Return the mean accept length, by request first: requests with many rounds count once."""
    return Estimate.of(torch.tensor([_mean(each.accepted) for each in rounds]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def print_results(results: Results, draft_len: int) -> None:
    table = Table(title=f"mean accepted of {draft_len} drafts, 95% interval over requests")
    for heading in ("view", "accepted", "pages read", "mass read", "rounds"):
        table.add_column(heading, justify="left" if heading == "view" else "right")
    for name, rounds in results.items():
        shares = [
            _mean([_mean(getattr(r, what)) for r in rounds]) for what in ("pages_read", "mass")
        ]
        num_rounds = sum(len(each.accepted) for each in rounds)
        cells = (str(mean_accepted(rounds)), *(f"{share:.3f}" for share in shares), str(num_rounds))
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
