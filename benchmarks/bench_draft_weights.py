"""Measure how many drafts are accepted if the model drafts with weights in 4 bits.

The target decodes greedily with its own weights. Then each kind of weights drafts over anchors
behind what the target has emitted, in rounds that begin again behind the first rejection.
--projections: also draft with each kind of weights and a rounded vocabulary projection.

usage: python benchmarks/bench_draft_weights.py [MODEL] [--length 4096] [--prompts 60] --out PATH
"""

from __future__ import annotations

import argparse
import time

import torch
from acceptance import report
from acceptance.draft_weights import (
    KINDS,
    PROJECTIONS,
    rounded_projection,
    with_projection,
    with_weights,
)
from acceptance.drafting import target_run
from acceptance.model import Llama
from acceptance.prompts import cut_prompts
from acceptance.report import Figure
from acceptance.rounds import run_rounds
from acceptance.view_reads import ViewReads
from bench_views import draft_caches, make_view, mean_accepted, parse_run, parser_of_runs
from rich.console import Console
from rich.progress import track

from kvspec_kernels.reference import int4_weights


def main() -> None:
    args = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Llama(args.model, device)
    drafters, seconds = {}, {}
    for kind in args.weights:
        begin = time.perf_counter()
        drafters[kind] = with_weights(model, kind, args)
        seconds[kind] = time.perf_counter() - begin
    for projection in args.projections:
        begin = time.perf_counter()
        weight = rounded_projection(model, projection, args)
        seconds[f"projection_{projection}"] = time.perf_counter() - begin
        for kind in args.weights:
            name = f"{kind}.projection_{projection}"
            drafters[name] = with_projection(drafters[kind], weight)
    prompts, sources = cut_prompts(args.model, args.prompts, args.length, args.seed, args.text)
    found: dict[str, list] = {kind: [] for kind in drafters}
    for batch in track(prompts.split(args.batch), "prompts"):
        run = target_run(model, batch, args.new_tokens, prefill_batch=1)
        for kind, drafter in drafters.items():
            caches = draft_caches(model, run)
            reads = ViewReads(drafter, run, caches, *make_view("all", model))
            found[kind] += run_rounds(drafter, run, caches, reads, args.draft_len)
    figures = []
    accepted = {kind: mean_accepted(rounds) for kind, rounds in found.items()}
    for kind, mean in accepted.items():
        name = f"w4.accept.{kind}"
        figures.append(Figure(f"{name}.mean", mean.mean, "drafts", mean.half_width))
        if kind != "target":
            ratio = mean.mean / accepted["target"].mean
            figures.append(Figure(f"{name}.vs_target_weights", ratio, "x", None, 1.0))
    figures += [
        Figure(f"w4.round_seconds.{kind}", taken, "s")
        for kind, taken in seconds.items()
        if kind != "target"
    ]
    settings = {
        "model": args.model.name,
        "prompts": args.prompts,
        "prompt_len": args.length,
        "new_tokens": args.new_tokens,
        "draft_len": args.draft_len,
        "prompts_from": sources,
        "seed": args.seed,
        "group": int4_weights.GROUP,
        "spread": "95% half width over requests",
        "raw": {kind: [each.accepted for each in rounds] for kind, rounds in found.items()},
    }
    report.write_json(args.out, "draft_weights", device, settings, figures, commit=args.commit)
    for figure in figures:
        Console().print(f"{figure.name}: {figure.value:.4g}")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_runs(__doc__, length=4096, new_tokens=128)
    parser.add_argument("--weights", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--projections", nargs="+", choices=PROJECTIONS, default=[])
    args = parse_run(parser)
    if "target" not in args.weights:
        parser.error("--weights needs target, to which others are compared")
    return args


if __name__ == "__main__":
    main()
