"""Does a GPU server answer token by token what it answers with drafting off, and what plain SGLang
answers, and where it does not, how close were the two tokens?

usage: python benchmarks/bench_gpu_identity.py --model PATH [--prompts N] [--out PATH]

In bf16 a matrix product of 17 rows may round otherwise than one of 1 row, so that the larger of two
nearly equal logits changes: a tie. The gap is that of the two likeliest tokens where answers part.
So does plain SGLang with fewer requests at once: it is compared with itself, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from acceptance.prompts import cut_prompts
from acceptance.report import Figure, write_json
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
# Differences of bf16 logits around 16 come in steps of 0.06 to 0.12; two steps are a tie.
TIE_GAP = 0.25

SHORTEST = 100

console = Console(width=110)


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens; gaps: by how much each was likelier (in log-probability) than the second."""

    tokens: list[int]
    gaps: list[float]


def main() -> None:
    args = parse_arguments()
    prompts = prompts_of_all_lengths(args.model, args.prompts, args.longest)
    common: dict[str, Any] = {
        "model_path": str(args.model),
        "dtype": "bfloat16",
        "mem_fraction_static": 0.5,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "disable_prefill_cuda_graph": True,
        "max_running_requests": args.concurrency,
        "page_size": 64,
        "log_level": "error",
        **json.loads(args.engine_args),
    }
    figures: list[Figure] = []
    plain_arguments = {"attention_backend": "flashinfer"} | common
    plain = answers("plain", prompts, args.new_tokens, plain_arguments)
    fewer = max(1, args.concurrency // 3)
    again = answers(
        f"plain, {fewer} at once",
        prompts,
        args.new_tokens,
        plain_arguments | {"max_running_requests": fewer},
    )
    figures += compare("identity.gpu.plain_differences_to_itself", again, plain)
    for target in args.targets:
        kvspec = common | {"kvspec": True, "kvspec_target": target, "kvspec_codec": args.codec}
        off = answers(f"{target}, off", prompts, args.new_tokens, kvspec | {"kvspec_draft_len": 0})
        on = answers(
            target, prompts, args.new_tokens, kvspec | {"kvspec_draft_len": args.draft_len}
        )
        suffix = "" if target == "exact" else f".{target}"
        figures += compare(f"identity.gpu{suffix}.mismatches_vs_draft_off", on, off)
        if target == "exact":
            figures += compare("identity.gpu.differences_to_plain", on, plain)
            figures += compare("identity.gpu.draft_off_differences_to_plain", off, plain)
            same = sum(a.tokens == b.tokens for a, b in zip(on, plain, strict=True))
            share = same / len(prompts)
            figures.append(Figure("identity.gpu.share_equal_plain", share, "of prompts", None, 1.0))
    settings = {
        "model": args.model.name,
        "prompts": len(prompts),
        "prompt_tokens": f"{min(map(len, prompts))} to {max(map(len, prompts))}",
        "new_tokens": args.new_tokens,
        "concurrency": args.concurrency,
        "concurrency_of_plain_compared_with_itself": fewer,
        "draft_len": args.draft_len,
        "codec": args.codec,
        "tie": f"the two likeliest tokens less than {TIE_GAP} apart in log-probability",
    }
    write_json(
        args.out,
        "gpu_identity",
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        settings,
        figures,
    )
    console.print(f"written: {args.out}")


def prompts_of_all_lengths(model: Path, count: int, longest: int) -> list[list[int]]:
    """Every length from SHORTEST to the longest, in even steps."""
    windows, _ = cut_prompts(model, count, longest)
    step = (longest - SHORTEST) / max(count - 1, 1)
    return [w[: SHORTEST + round(i * step)] for i, w in enumerate(windows.tolist())]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=6000, help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--codec", default="log4")
    parser.add_argument("--draft-len", default="auto")
    parser.add_argument("--engine-args", default="{}", help="more of sglang.Engine's, as JSON")
    parser.add_argument("--targets", nargs="+", default=["exact"])
    default = ROOT / "benchmarks" / "results" / "identity_h200.json"
    parser.add_argument("--out", type=Path, default=default)
    return parser.parse_args()


def answers(
    name: str, prompts: Sequence[list[int]], new_tokens: int, arguments: dict[str, Any]
) -> list[Answer]:
    """Greedy answers of a fresh engine, all prompts at once."""
    import sglang

    engine = sglang.Engine(**arguments)
    try:
        outputs = engine.generate(
            input_ids=list(prompts),
            sampling_params={
                "temperature": 0.0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
            },
            return_logprob=True,
            top_logprobs_num=2,
        )
    finally:
        engine.shutdown()
    console.print(f"{name}: {len(outputs)} answers")
    return [
        Answer(
            output["output_ids"],
            [two[0][0] - two[1][0] for two in output["meta_info"]["output_top_logprobs"]],
        )
        for output in outputs
    ]


def compare(name: str, ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[Figure]:
    """How many answers differ, how many of them not by a tie, and the gaps where they part."""
    gaps = []
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        pairs = enumerate(zip(a.tokens, b.tokens, strict=True))
        place = next((i for i, (x, y) in pairs if x != y), None)
        if place is not None:
            gap = max(a.gaps[place], b.gaps[place])
            gaps.append(gap)
            console.print(f"{name}: prompt {index} parts at token {place}, gap {gap:.4f}")
    beyond = sum(gap >= TIE_GAP for gap in gaps)
    console.print(f"{name}: {len(gaps)} of {len(ours)}, {beyond} of them no ties")
    figures = [
        Figure(name, len(gaps), f"of {len(ours)} answers", None, 0),
        Figure(f"{name}.beyond_a_tie", beyond, f"of {len(ours)} answers", None, 0),
    ]
    if gaps:
        figures += [
            Figure(f"{name}.largest_gap", max(gaps), "log-probability"),
            Figure(f"{name}.median_gap", statistics.median(gaps), "log-probability"),
        ]
    return figures


if __name__ == "__main__":
    main()
