"""Measure how many drafts are accepted by what drafts read: scorers, codecs, and both together.

Whole requests: the target decodes greedily, and each method drafts behind what the target has
emitted, in rounds that begin again behind the first rejection. A method is a scorer, what it is
read through (the model's own KV, `plain`, or a codec's anchors), and a budget. One target run and
one pass of scores serve all methods of a batch of prompts.

usage: python benchmarks/bench_compressors.py [MODEL] --out benchmarks/results/compressors_NAME.json
           [--length 16384] [--prompts 24] [--batch 24] [--by pages]
           [--scorers random snapkv:window=64 kvzap:file=PATH ...]
           [--codecs plain uniform4:4 uniform4:2] [--alone log4:4 kvquant:3:before_rotary ...]
           [--budgets 0.05 0.1 0.2 0.5]

--scorers: default every registered scorer that needs no file. kvzap reads a file of
train_kvzap.py, duo one of calibrate_duo.py. --codecs: what every scorer is read through. --alone:
codecs whose anchors drafts read whole; default all. before_rotary: K is encoded in front of the
rotary embedding, as KVQuant does; no server can, as pages do not know their positions. The result
is written after each batch of prompts; large batches are fastest. collect_compressors.py puts runs
together.

Figures of each method, `compressors.SCORER.CODEC.BUDGETpct` or `compressors.all.CODEC`:
accepted (of --draft-len; the baseline reads all tokens of the same codec), vs_dense (ratio to that
baseline), vs_dense4 (to all anchors of uniform4 in 4 bits), read (share of the context),
bytes_per_token and bytes_vs_dense4 (that a draft reads), tokens_vs_plain (tokens that fit: anchors
and residuals in HBM; .hosted: residuals in host memory; .freed: besides, only anchors that drafts
read), tokens_per_s (16 requests of 32K tokens of an 8B shape on an H200, by the planner's costs).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from acceptance import report
from acceptance.drafting import TargetRun, before_rotary, decoded_run, in_parts
from acceptance.model import Llama
from acceptance.prompts import cut_prompts
from acceptance.rounds import DraftCaches, Rounds, run_rounds
from acceptance.scored import AllReads, Kept, PromptScores, ScoredReads, prefill_and_score
from bench_views import parse_run, parser_of_runs
from compressors.figures import Results, accepted_of, figures_of, raw_of, share_of
from compressors.methods import (
    PAGE_SIZE,
    UNITS,
    Anchors,
    Chooser,
    all_anchors,
    all_choosers,
    anchors_of,
    chooser_of,
    options_of,
)
from compressors.names import ALL_TOKENS, DENSE4, PLAIN, Method
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_kvspec.core.errors import ConfigError

# Pages of all prompts of a batch that a codec encodes at once.
PAGES_AT_ONCE = 1024


def main() -> None:
    parser = parser_of(__doc__)
    args = parse_run(parser)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Llama(args.model, device)
    try:
        study = Study.of(args, model)
    except ConfigError as error:
        parser.error(str(error))
    prompts, sources = cut_prompts(args.model, args.prompts, args.length, args.seed, args.text)
    anchors = {each.label: each for each in study.alone}
    rescored = frozenset(each.label for each in study.choosers if each.scorer.needs.drafting)
    results: Results = {}
    for done, results in study.measure(prompts):
        settings = {
            "model": args.model.name,
            "prompts": done,
            "prompt_len": args.length,
            "new_tokens": args.new_tokens,
            "draft_len": args.draft_len,
            "text": args.text,
            "prompts_from": sources,
            "seed": args.seed,
            "page_size": PAGE_SIZE,
            "by": args.by,
            "scorers": {each.label: options_of(each) for each in study.choosers},
            "left_out": study.left_out,
            "spread": "95% half width over requests",
            "raw": raw_of(results),
        }
        figures = figures_of(results, anchors, rescored, model.shape, args.draft_len)
        report.write_json(args.out, "compressors", device, settings, figures, commit=args.commit)
    print_results(results, study.left_out, args.draft_len)


def parser_of(description: str) -> argparse.ArgumentParser:
    parser = parser_of_runs(description, length=16384, new_tokens=128)
    parser.set_defaults(prompts=24, batch=24)
    add = parser.add_argument
    add("--scorers", nargs="*", metavar="NAME[:key=value,...]", help="default: all without a file")
    add(
        "--codecs",
        nargs="*",
        default=[PLAIN, DENSE4, "uniform4:2"],
        metavar="CODEC[:BITS][:before_rotary]",
        help=f"what scorers are read through; {PLAIN}: the model's own KV",
    )
    add(
        "--alone",
        nargs="*",
        metavar="CODEC[:BITS][:before_rotary]",
        help="codecs without a scorer; default: all",
    )
    add("--budgets", nargs="+", type=float, default=[0.05, 0.1, 0.2, 0.5], help="shares to read")
    add("--by", choices=UNITS, default="pages", help="units in which drafts read")
    return parser


class Study:
    """Methods to measure on one model. alone: what drafts read whole, all of `composed` among
    them. composed: what every scorer is read through. left_out: reasons why methods cannot be
    made, by name."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: Llama,
        choosers: Sequence[Chooser],
        composed: Sequence[Anchors],
        alone: Sequence[Anchors],
        left_out: dict[str, str],
    ) -> None:
        self._args, self._model = args, model
        self.choosers, self.composed, self.left_out = choosers, composed, left_out
        # Choosers that differ in the unit of reading share scores, under the label of one of them.
        self._names = {each.scorer: each.label for each in choosers}
        self._scorers = {label: scorer for scorer, label in self._names.items()}
        # Every method is compared with all tokens of its own anchors, and of DENSE4.
        needed = [anchors_of(DENSE4, model.shape.head_dim), *composed, *alone]
        self.alone = list({each.label: each for each in needed}.values())

    @classmethod
    def of(cls, args: argparse.Namespace, model: Llama) -> Study:
        """Make the study of the arguments. Raises ConfigError for names that do not exist."""
        head_dim, left_out = model.shape.head_dim, {}
        choosers = [chooser_of(text, args.by) for text in args.scorers or ()]
        if args.scorers is None:
            choosers, refused = all_choosers(args.by)
            left_out |= refused
        alone = [anchors_of(text, head_dim) for text in args.alone or ()]
        if args.alone is None:
            alone, refused = all_anchors(head_dim)
            left_out |= refused
        composed = [anchors_of(text, head_dim) for text in args.codecs]
        return cls(args, model, choosers, composed, alone, left_out)

    def measure(self, prompts: torch.Tensor) -> Iterator[tuple[int, Results]]:
        """Yield the number of prompts so far and the rounds of all methods, batch by batch."""
        args = self._args
        results: dict[Method, list[Rounds]] = {}
        batches = prompts.split(args.batch)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn()) as progress:
            methods = len(self.alone) + len(self.choosers) * len(self.composed) * len(args.budgets)
            task = progress.add_task("prefill and scores", total=len(batches) * (2 + methods))
            for number, batch in enumerate(batches):
                progress.update(task, description="prefill and scores")
                parts, scores = prefill_and_score(
                    self._model, batch, self._scorers, args.new_tokens
                )
                progress.update(task, advance=1, description="target run")
                run = decoded_run(self._model, parts, batch.shape[1], args.new_tokens)
                del parts
                progress.advance(task)
                for anchors in self.alone:
                    for method, rounds in self._rounds(run, anchors, scores):
                        progress.update(task, advance=1, description=method.name)
                        results.setdefault(method, []).extend(rounds)
                yield number * args.batch + len(batch), results

    def _rounds(
        self, run: TargetRun, anchors: Anchors, scores: dict[str, list[PromptScores]]
    ) -> Iterator[tuple[Method, list[Rounds]]]:
        """Yield the rounds of all methods with the same anchors."""
        model, args = self._model, self._args
        page_map = in_parts(anchors.page_map, PAGES_AT_ONCE)
        if anchors.is_before_rotary:
            num_pages = (run.prompt_len + run.steps) // PAGE_SIZE
            page_map = before_rotary(page_map, model, num_pages)
        caches = DraftCaches(run, page_map, PAGE_SIZE)
        rounds = run_rounds(model, run, caches, AllReads(model, run), args.draft_len)
        yield Method(ALL_TOKENS, anchors.label, 1.0), rounds
        if anchors.label not in [each.label for each in self.composed]:
            return
        for chooser in self.choosers:
            for budget in args.budgets:
                caches.reset()
                reads = ScoredReads(
                    model,
                    run,
                    caches,
                    chooser.scorer,
                    scores[self._names[chooser.scorer]],
                    kept=Kept(budget, chooser.allocation, chooser.unit),
                )
                rounds = run_rounds(model, run, caches, reads, args.draft_len)
                yield Method(chooser.label, anchors.label, budget), rounds


def print_results(results: Results, left_out: dict[str, str], draft_len: int) -> None:
    table = Table(title=f"mean accepted of {draft_len} drafts, 95% interval over requests")
    for heading in ("scorer", "anchors", "budget", "accepted", "read", "rounds"):
        table.add_column(heading, justify="left" if heading in ("scorer", "anchors") else "right")
    for method, rounds in results.items():
        table.add_row(
            method.scorer,
            method.anchors,
            f"{method.budget:g}",
            str(accepted_of(rounds)),
            f"{share_of(rounds).mean:.3f}",
            str(sum(len(each.accepted) for each in rounds)),
        )
    Console().print(table)
    for name, reason in left_out.items():
        Console().print(f"left out: {name}: {reason}", markup=False)


if __name__ == "__main__":
    main()
