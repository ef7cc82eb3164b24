"""Count the pages that hold a token which a method would keep, if it chose single tokens.

    python benchmarks/bench_touched_pages.py [MODEL] [--prompts 4] [--length 16384] [--out PATH]

A kernel that reads pages and masks tokens has to read every such page. So this is the share of the
anchors that drafts would read on a GPU with by=tokens. Choices are those after the prefill.

Figures: compressors.touched.SCORER.BUDGETpct, a mean over prompts, layers and KV heads. The
baseline is the share of tokens that is kept.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from acceptance.model import Llama
from acceptance.prompts import TEXTS, cut_prompts
from acceptance.report import Figure, write_json
from acceptance.scored import score_prompts
from compressors.methods import PAGE_SIZE, all_choosers, chooser_of, options_of
from rich.console import Console
from rich.progress import track

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.scorers.selection import kept_tokens

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = (0.05, 0.1, 0.2, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    default_model = ROOT.parent / "shared" / "models" / "eval-31m"
    add("model", type=Path, nargs="?", default=default_model, help="folder of a model")
    add("--prompts", type=int, default=4)
    add("--length", type=int, default=16384, help="tokens per prompt, a multiple of 64")
    add("--text", choices=TEXTS, default="code", help="text of the prompts")
    add("--seed", type=int, default=0)
    add("--scorers", nargs="*", metavar="NAME[:key=value,...]", help="default: all without a file")
    add("--commit", help="commit to record (default: what git reports)")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "touched_pages.json")
    args = parser.parse_args()
    if args.prompts < 1 or args.length < 1 or args.length % PAGE_SIZE:
        parser.error("--prompts must be at least 1, and --length a multiple of 64")
    try:
        choosers, left_out = all_choosers("tokens")
        if args.scorers is not None:
            choosers = [chooser_of(text, "tokens") for text in args.scorers]
    except ConfigError as error:
        parser.error(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Llama(args.model, device)
    prompts, sources = cut_prompts(args.model, args.prompts, args.length, args.seed, args.text)
    kept: dict[str, list[float]] = {}
    touched: dict[str, list[float]] = {}
    for prompt in track(prompts.split(1), "prompts", console=Console(stderr=True)):
        scores = score_prompts(model, prompt, {each.label: each.scorer for each in choosers})
        for chooser in choosers:
            (scored,) = scores[chooser.label]
            for budget in BUDGETS:
                tokens = kept_tokens(scored.scores, budget, chooser.allocation, chooser.unit)
                pages = tokens.unflatten(-1, (-1, PAGE_SIZE)).any(-1)
                name = f"{chooser.label}.{budget * 100:g}pct"
                kept.setdefault(name, []).append(tokens.float().mean().item())
                touched.setdefault(name, []).append(pages.float().mean().item())
    figures = [
        Figure(
            f"compressors.touched.{name}",
            statistics.fmean(shares),
            "of the pages",
            (max(shares) - min(shares)) / 2,
            statistics.fmean(kept[name]),
        )
        for name, shares in touched.items()
    ]
    settings = {
        "model": args.model.name,
        "prompts": args.prompts,
        "prompt_len": args.length,
        "text": args.text,
        "prompts_from": sources,
        "seed": args.seed,
        "page_size": PAGE_SIZE,
        "scorers": {each.label: options_of(each) for each in choosers},
        "left_out": left_out if args.scorers is None else {},
        "spread": "half the distance between the least and the largest prompt",
        "raw": {"touched": touched, "kept": kept},
    }
    write_json(args.out, "touched_pages", device, settings, figures, commit=args.commit)
    for figure in figures:
        print(
            f"{figure.name}: {figure.value:.3f} of the pages, {figure.baseline:.3f} of the tokens"
        )


if __name__ == "__main__":
    main()
