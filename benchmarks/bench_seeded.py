"""Compare sampled answers of a server with its answers with drafting off, seed by seed.

    python benchmarks/bench_seeded.py [MODEL]                          # on a CPU, in fp32
    python benchmarks/bench_seeded.py MODEL --deterministic --out PATH # on a GPU, in bf16

With a seed, KVSpec draws the noise of a token from seed and position, so drafting should change no
token. Each case of CASES is asked with every prompt and a seed of its own. The server without
drafting runs fewer requests at a time. On a GPU, answers can be expected to be equal only with
--deterministic.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from acceptance.report import Figure, write_json
from bench_gpu_identity import engine, prompts_of_all_lengths
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
    },
    "required": ["name", "size", "tags"],
}
# Sampling parameters by name. Those that are not given have their defaults, with temperature 1.
CASES: Mapping[str, dict[str, Any]] = {
    "temperature_0_6": {"temperature": 0.6},
    "temperature_1": {},
    "temperature_1_5": {"temperature": 1.5},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "presence_penalty": {"presence_penalty": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "all_filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "filters_and_penalties": {"top_p": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "json_schema": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": r"[a-f]{3,12}-[0-9]{2,40}(, (yes|no)){2,9}"},
}
GRAMMARS = ("json_schema", "regex")

console = Console(width=110)


def main() -> None:
    args = parse_arguments()
    on_gpu = torch.cuda.is_available()
    prompts = prompts_of_all_lengths(args.model, args.prompts, args.longest)
    common: dict[str, Any] = {
        "model_path": str(args.model),
        "log_level": "error",
        "random_seed": 0,
        "kvspec": True,
        **(_gpu_arguments() if on_gpu else _cpu_arguments()),
        **json.loads(args.engine_args),
    }
    if args.deterministic:
        common["enable_deterministic_inference"] = True
    few = max(args.concurrency // 3, 1)
    with engine(**common, kvspec_draft_len=0, max_running_requests=few) as server:
        off, _ = answers("drafting off", server, prompts, args.new_tokens)
    with engine(**common, max_running_requests=args.concurrency) as server:
        on, drafts = answers("drafting", server, prompts, args.new_tokens)
    settings = {
        "model": args.model.name,
        "prompts": len(prompts),
        "prompt_tokens": f"{min(map(len, prompts))} to {max(map(len, prompts))}",
        "new_tokens": args.new_tokens,
        "concurrency": {"drafting": args.concurrency, "drafting off": few},
        "cases": CASES,
        "arguments": {k: v for k, v in common.items() if k != "model_path"},
        "seeds": "the number of the answer, over all cases",
    }
    figures = figures_of(off, on, drafts)
    device = torch.device("cuda" if on_gpu else "cpu")
    write_json(args.out, "seeded", device, settings, figures, commit=args.commit)
    console.print(f"written: {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    default_model = ROOT / "models" / "demo-5m"
    add("model", type=Path, nargs="?", default=default_model, help="folder of a model")
    add("--prompts", type=int, default=25, help="prompts of each case")
    add("--longest", type=int, default=1500, help="tokens of the longest prompt")
    add("--new-tokens", type=int, default=64)
    add("--concurrency", type=int, default=8, help="requests at a time, with drafting")
    add("--deterministic", action="store_true", help="with --enable-deterministic-inference")
    add("--engine-args", default="{}", help="further arguments of sglang.Engine, as JSON")
    add("--commit", help="commit to record (default: what git reports)")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "seeded_cpu.json")
    return parser.parse_args()


def _cpu_arguments() -> dict[str, Any]:
    return {
        "device": "cpu",
        "dtype": "float32",
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.1,
        "max_total_tokens": 16384,
    }


def _gpu_arguments() -> dict[str, Any]:
    return {"dtype": "bfloat16", "mem_fraction_static": 0.5, "sampling_backend": "pytorch"}


def answers(
    name: str, server: Any, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[dict[str, list[list[int]]], int]:
    """Return the tokens by case and prompt, and how many drafts were accepted in all."""
    found: dict[str, list[list[int]]] = {}
    seed = accepted = 0
    for case, given in CASES.items():
        params = []
        for _ in prompts:
            own = {"temperature": 1.0, "max_new_tokens": new_tokens, "sampling_seed": seed, **given}
            # An answer in a grammar ends where the grammar ends.
            params.append(own | {"ignore_eos": case not in GRAMMARS})
            seed += 1
        outputs = server.generate(input_ids=list(prompts), sampling_params=params)
        found[case] = [output["output_ids"] for output in outputs]
        histograms = (output["meta_info"]["kvspec"]["accept_histogram"] for output in outputs)
        accepted += sum(n * count for each in histograms for n, count in enumerate(each))
        console.print(f"{name}: {case}, {len(outputs)} answers")
    return found, accepted


def figures_of(
    off: Mapping[str, list[list[int]]], on: Mapping[str, list[list[int]]], accepted: int
) -> list[Figure]:
    """Return how many answers differ, by case and in all. Raises ValueError if nothing could have
    differed: if no draft was accepted, or all seeds gave the same answers."""
    every = [tuple(tokens) for case in on.values() for tokens in case]
    if accepted == 0 or len(set(every)) < len(every) // 2:
        raise ValueError(
            f"{accepted} drafts were accepted and {len(set(every))} of {len(every)} answers are "
            "distinct: such answers show nothing"
        )
    figures, total = [], 0
    for case, expected in off.items():
        pairs = list(zip(on[case], expected, strict=True))
        differ = sum(ours != theirs for ours, theirs in pairs)
        for index, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                both = enumerate(zip(ours, theirs, strict=False))
                place = next((i for i, (a, b) in both if a != b), min(len(ours), len(theirs)))
                console.print(f"{case}: answer {index} differs from token {place} on")
        total += differ
        unit = f"of {len(pairs)} answers"
        figures.append(Figure(f"lossless.seeded.{case}.mismatches", differ, unit, None, 0))
    first = [
        Figure("lossless.seeded.mismatches", total, f"of {len(every)} answers", None, 0),
        Figure("lossless.seeded.answers", len(every), "answers"),
        Figure("lossless.seeded.accepted", accepted, "drafts"),
    ]
    console.print(f"{total} of {len(every)} answers differ; {accepted} drafts were accepted")
    return first + figures


if __name__ == "__main__":
    main()
