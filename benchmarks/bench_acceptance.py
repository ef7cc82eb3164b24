"""Measure the accept length of each codec, and the error of attention outputs.

Prompts are outside the model's training data. The target run prefills and decodes greedily over the
exact cache. The draft run decodes greedily from the same first token, over a cache whose full
pages, except the newest, went through the codec. The accept length is the common prefix.

usage: python benchmarks/bench_acceptance.py [MODEL] [--prompts 200] [--out PATH] [--sweep]

A model of English, of 8K tokens of context:
    python models/smollm2.py
    python benchmarks/bench_acceptance.py .kvspec/models/smollm2-135m --text english --prompts 20 \
        --length 7680 --out benchmarks/results/acceptance_smollm2.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from acceptance import report
from acceptance.drafting import (
    TargetRun,
    accepted_lengths,
    attention_vnmse,
    draft_cache,
    target_run,
)
from acceptance.model import Llama
from acceptance.prompts import TEXTS, cut_prompts
from acceptance.report import Estimate, Figure
from acceptance.variants import MAX_ANCHOR_BITS, PAGE_SIZE, Variant, grid, shipped
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
DRAFT_LENGTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
SWEEP_DRAFT_LEN = 32
# Baseline of each log4 variant: the uniform4 variant with the same target.
BASELINES = {"log4": "uniform4", "log4_int8": "uniform4_int8"}


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one variant by prompt: accepted tokens of the longest draft [prompts], and
    attention error [prompts]."""

    variant: Variant
    accepted: torch.Tensor
    vnmse: torch.Tensor

    def accepted_of(self, draft_len: int) -> Estimate:
        return Estimate.of(self.accepted.clamp_max(draft_len))


def main() -> None:
    args = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model = Llama(args.model, device)
    prompts, sources = cut_prompts(args.model, args.prompts, args.length, args.seed, args.text)
    steps = SWEEP_DRAFT_LEN if args.sweep else max(DRAFT_LENGTHS)
    variants = (grid if args.sweep else shipped)(model.shape.head_dim)
    results = measure(model, prompts, variants, steps, args.batch, args.prefill_batch)
    if args.sweep:
        print_sweep(results)
        return
    settings = {
        "model": args.model.name,
        "prompts": args.prompts,
        "prompt_len": args.length,
        "prompts_from": sources,
        "seed": args.seed,
        "page_size": PAGE_SIZE,
        "spread": "95% half width over prompts",
    }
    report.write_json(args.out, "acceptance", device, settings, figures_of(results))
    curves = {r.variant.name: [r.accepted_of(n) for n in DRAFT_LENGTHS] for r in results}
    title = f"{args.model.name}, {args.prompts} prompts of {args.length} tokens"
    report.draw_curves(args.out.with_suffix(".png"), DRAFT_LENGTHS, curves, title)
    print_results(results)
    Console().print(f"written: {args.out} and {args.out.with_suffix('.png').name}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_model = ROOT.parent / "shared" / "models" / "eval-31m"
    parser.add_argument(
        "model", type=Path, nargs="?", default=default_model, help="folder of a Hugging Face model"
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--length", type=int, default=4096, help="tokens per prompt")
    parser.add_argument("--text", choices=TEXTS, default="code", help="text of the prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--batch", type=int, default=200, help="prompts whose caches are in memory at once"
    )
    parser.add_argument("--prefill-batch", type=int, default=4)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "acceptance.json"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="print a comparison of log4 settings; write no file"
    )
    args = parser.parse_args()
    if args.prompts < 2 or args.length < 2 * PAGE_SIZE or args.length % PAGE_SIZE:
        parser.error(
            f"--prompts must be at least 2, got {args.prompts}; --length must be a multiple of "
            f"{PAGE_SIZE} and at least {2 * PAGE_SIZE}, got {args.length}"
        )
    return args


@torch.inference_mode()
def measure(
    model: Llama,
    prompts: torch.Tensor,
    variants: list[Variant],
    steps: int,
    batch: int,
    prefill_batch: int,
) -> list[Measured]:
    """Measure every variant on every prompt. All variants share the target run of a batch."""
    accepted: list[list[torch.Tensor]] = [[] for _ in variants]
    vnmse: list[list[torch.Tensor]] = [[] for _ in variants]
    batches = prompts.split(batch)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        task = progress.add_task("target run", total=len(batches) * (len(variants) + 1))
        for part in batches:
            progress.update(task, description="target run")
            run = target_run(model, part, steps, prefill_batch)
            progress.advance(task)
            for index, variant in enumerate(variants):
                progress.update(task, description=variant.name)
                lengths, errors = _measure_one(model, run, variant)
                accepted[index].append(lengths.cpu())
                vnmse[index].append(errors.cpu())
                progress.advance(task)
    return [
        Measured(variant, torch.cat(lengths), torch.cat(errors))
        for variant, lengths, errors in zip(variants, accepted, vnmse, strict=True)
    ]


def _measure_one(
    model: Llama, run: TargetRun, variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    cache = draft_cache(run, variant.page_map, PAGE_SIZE)
    # Measure errors before drafting: drafts overwrite the target's tokens in this cache.
    errors = attention_vnmse(run, cache)
    return accepted_lengths(model, run, cache), errors


def figures_of(results: Iterable[Measured]) -> list[Figure]:
    by_name = {r.variant.name: r for r in results}
    figures = []
    for name, result in by_name.items():
        baseline = by_name.get(BASELINES.get(name, ""))
        for n in DRAFT_LENGTHS:
            got = result.accepted_of(n)
            figures.append(
                Figure(
                    f"accept.{name}.mean_of_{n}",
                    got.mean,
                    "tokens",
                    got.half_width,
                    baseline.accepted_of(n).mean if baseline else None,
                )
            )
        error = Estimate.of(result.vnmse)
        against = Estimate.of(baseline.vnmse).mean if baseline else None
        figures.append(
            Figure(f"vnmse.{name}", error.mean, "||o-o'||²/||o||²", error.half_width, against)
        )
        bits = baseline.variant.bits if baseline else None
        figures.append(
            Figure(f"accept.{name}.bits", result.variant.bits, "bits/element", None, bits)
        )
    return figures


def print_results(results: list[Measured]) -> None:
    table = Table(title="mean accept length, 95% interval")
    for heading in ("cache", "bits", *(f"of {n} drafts" for n in (8, 16, 32, 64)), "vNMSE"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for r in results:
        cells = [str(r.accepted_of(n)) for n in (8, 16, 32, 64)]
        error = f"{Estimate.of(r.vnmse).mean:.2e}"
        table.add_row(r.variant.name, f"{r.variant.bits:.3f}", *cells, error)
    Console().print(table)


def print_sweep(results: list[Measured]) -> None:
    """Print the sweep, best acceptance first. Column `paired` is the mean difference to the
    defaults, prompt by prompt, which leaves out the large spread between prompts."""
    default = results[0]
    table = Table(title=f"mean accept length of {SWEEP_DRAFT_LEN} drafts, 95% interval")
    for heading in ("settings", "bits", "accepted", "paired", "vNMSE"):
        table.add_column(heading, justify="left" if heading == "settings" else "right")
    for r in sorted(results, key=lambda r: -r.accepted_of(SWEEP_DRAFT_LEN).mean):
        paired = Estimate.of(r.accepted - default.accepted) if r is not default else "default"
        bits = f"{r.variant.bits:.3f}" + ("" if r.variant.bits <= MAX_ANCHOR_BITS else " over")
        error = f"{Estimate.of(r.vnmse).mean:.2e}"
        accepted = str(r.accepted_of(SWEEP_DRAFT_LEN))
        table.add_row(r.variant.name, bits, accepted, str(paired), error)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
