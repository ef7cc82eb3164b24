"""Compare the answers of a GPU server with its answers with drafting off, and with plain SGLang's.

usage: python benchmarks/bench_gpu_identity.py --model PATH [--prompts N] [--out PATH]
       python benchmarks/bench_gpu_identity.py --model PATH --deterministic
       python benchmarks/bench_gpu_identity.py --model PATH --isolate {nothing,attention,operators}

In bf16, a matrix product of 17 rows may round differently from one of 1 row. The larger of two
nearly equal logits can then change: a tie. The gap is the difference in log-probability of the two
most likely tokens at the first place where two answers differ.
--control: compare plain SGLang with itself, too, with fewer requests at once.
--isolate: find what makes answers differ. Compare drafting with drafting off only, with nothing
deterministic, with the target's attention alone, or with SGLang's batch-invariant operators alone.

--deterministic: all servers run with --enable-deterministic-inference. Matrix products and
attention are then batch-invariant, and drafting must not change a token. The server with drafting
answers a second time, for requests without log-probabilities, as users send them. For these, the
server pre-launches rounds, and rounds without drafts compute several tokens at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from acceptance.prompts import cut_prompts, even_lengths
from acceptance.report import Figure, write_json
from rich.console import Console
from serving.environment import server_environment

ROOT = Path(__file__).resolve().parents[1]
# Folder of a plug-in.
OPERATORS = ROOT / "benchmarks" / "serving" / "operators"
# bf16 logits from 16 to 32 have steps of 0.125. Let two runs prefer different tokens of a pair, and
# let rounding change none of the four logits by more than a step. Then both gaps together are at
# most two steps. Log-probabilities in fp32 add a little rounding.
TIE_GAP = 0.25 + 1e-5

SHORTEST = 100
DRAFTING_OFF = {"kvspec_draft_len": 0}

console = Console(width=110)


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one answer. gaps: log-probability of each token minus that of the second most
    likely token. pairs: the two most likely tokens of each place."""

    tokens: list[int]
    gaps: list[float]
    pairs: list[frozenset[int]]


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        # Engines start in this process, and look for plug-ins on its path.
        sys.path[:0] = server_environment(Path(scratch), None)["PYTHONPATH"].split(os.pathsep)
        run(args)


def run(args: argparse.Namespace) -> None:
    """Start the engines, compare their answers, and write the result."""
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
    if args.deterministic:
        common["enable_deterministic_inference"] = True
    of_targets = {
        target: {
            **common,
            "kvspec": True,
            "kvspec_target": target,
            "kvspec_codec": args.codec,
            "kvspec_draft_len": args.draft_len,
            **json.loads(args.kvspec_engine_args),
        }
        for target in args.targets
    }
    if args.isolate:
        figures = isolated(args.isolate, of_targets["exact"], prompts, args.new_tokens)
    else:
        figures = compared(args, common, of_targets, prompts)
    fewer = _fewer(args.concurrency)
    settings = {
        "model": args.model.name,
        "prompts": len(prompts),
        "prompt_tokens": f"{min(map(len, prompts))} to {max(map(len, prompts))}",
        "new_tokens": args.new_tokens,
        "concurrency": args.concurrency,
        "concurrency_of_plain_compared_with_itself": fewer if args.control else None,
        "deterministic": args.isolate or args.deterministic,
        "draft_len": args.draft_len,
        "codec": args.codec,
        "tie": f"the log-probabilities of the two most likely tokens differ by at most {TIE_GAP}",
    }
    write_json(
        args.out,
        "gpu_identity",
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        settings,
        figures,
        commit=args.commit or None,
    )
    console.print(f"written: {args.out}")


def compared(
    args: argparse.Namespace,
    common: dict[str, Any],
    of_targets: Mapping[str, dict[str, Any]],
    prompts: Sequence[list[int]],
) -> list[Figure]:
    """Compare each target with drafting off, and the exact one with plain SGLang. common: arguments
    of every engine. of_targets: those with drafting, by target."""
    prefix = "identity.gpu.deterministic" if args.deterministic else "identity.gpu"
    plain_arguments = {"attention_backend": "flashinfer"} | common
    with engine(**plain_arguments) as server:
        plain = answers("plain", server, prompts, args.new_tokens)
    figures: list[Figure] = []
    if args.control:
        fewer = _fewer(args.concurrency)
        with engine(**plain_arguments | {"max_running_requests": fewer}) as server:
            again = answers(f"plain, {fewer} at once", server, prompts, args.new_tokens)
        figures += compare(f"{prefix}.plain_differences_to_itself", again, plain)
    for target, drafting in of_targets.items():
        with engine(**drafting | DRAFTING_OFF) as server:
            off = answers(f"{target}, drafting off", server, prompts, args.new_tokens)
        with engine(**drafting) as server:
            on = answers(target, server, prompts, args.new_tokens)
            unwatched = tokens_alone(server, prompts, args.new_tokens) if args.deterministic else []
        suffix = "" if target == "exact" else f".{target}"
        figures += compare(f"{prefix}{suffix}.mismatches_vs_draft_off", on, off)
        if unwatched:
            differ = sum(a != b.tokens for a, b in zip(unwatched, off, strict=True))
            name = f"{prefix}{suffix}.mismatches_vs_draft_off.without_logprobs"
            figures.append(Figure(name, differ, f"of {len(off)} answers", None, 0))
            console.print(f"{name}: {differ}")
        if target == "exact":
            figures += compare(f"{prefix}.differences_to_plain", on, plain)
            figures += compare(f"{prefix}.draft_off_differences_to_plain", off, plain)
            same = sum(a.tokens == b.tokens for a, b in zip(on, plain, strict=True))
            share = same / len(prompts)
            figures.append(Figure(f"{prefix}.share_equal_plain", share, "of prompts", None, 1.0))
    return figures


def _fewer(concurrency: int) -> int:
    """Return the requests that plain SGLang runs at once, to be compared with itself."""
    return max(1, concurrency // 3)


def isolated(
    what: str, drafting: dict[str, Any], prompts: Sequence[list[int]], new_tokens: int
) -> list[Figure]:
    """Return how many answers differ from drafting off if only `what` gives rows that do not depend
    on the batch. Answers that still differ do so because of the rest."""
    if what == "attention":
        drafting = drafting | {"kvspec_target_attention": "deterministic"}
    with batch_invariant_operators() if what == "operators" else nullcontext():
        with engine(**drafting | DRAFTING_OFF) as server:
            off = answers(f"deterministic {what}, drafting off", server, prompts, new_tokens)
        with engine(**drafting) as server:
            on = answers(f"deterministic {what}", server, prompts, new_tokens)
    return compare(f"identity.gpu.deterministic_{what}.mismatches_vs_draft_off", on, off)


@contextmanager
def batch_invariant_operators() -> Iterator[None]:
    """Start engines with SGLang's batch-invariant operators, and without anything else of
    deterministic inference."""
    # Spawned processes look for plug-ins on the sys.path of this process.
    sys.path.append(str(OPERATORS))
    os.environ["KVSPEC_INVARIANT_OPERATORS"] = "1"
    try:
        yield
    finally:
        sys.path.remove(str(OPERATORS))
        del os.environ["KVSPEC_INVARIANT_OPERATORS"]


def prompts_of_all_lengths(model: Path, count: int, longest: int) -> list[list[int]]:
    """Return `count` prompts, with lengths from SHORTEST to `longest` tokens in even steps."""
    windows, _ = cut_prompts(model, count, longest)
    lengths = even_lengths(count, SHORTEST, longest)
    return [w[:n] for w, n in zip(windows.tolist(), lengths, strict=True)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=6000, help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--codec", default="uniform4")
    parser.add_argument("--draft-len", default="auto")
    parser.add_argument(
        "--engine-args", default="{}", help="further arguments of every sglang.Engine, as JSON"
    )
    parser.add_argument(
        "--kvspec-engine-args",
        default="{}",
        help="further arguments of the engines with KVSpec, as JSON",
    )
    parser.add_argument("--targets", nargs="+", default=["exact"])
    parser.add_argument(
        "--control", action="store_true", help="compare plain SGLang with itself, too"
    )
    parser.add_argument(
        "--isolate",
        choices=("nothing", "attention", "operators"),
        help="compare drafting with drafting off only, with this alone deterministic",
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--commit", default="", help="commit to record (default: what git reports)")
    parser.add_argument(
        "--out",
        type=Path,
        help="result file (default: benchmarks/results/identity[_deterministic]_h200.json, with "
        "--isolate identity_isolated_NAME.json)",
    )
    args = parser.parse_args()
    if args.isolate and "exact" not in args.targets:
        parser.error("--isolate needs the target exact")
    if args.isolate and (args.deterministic or args.control):
        parser.error("--isolate makes no sense with --deterministic or --control")
    if args.out is None:
        kind = "identity_deterministic_h200" if args.deterministic else "identity_h200"
        if args.isolate:
            kind = f"identity_isolated_{args.isolate}"
        args.out = ROOT / "benchmarks" / "results" / f"{kind}.json"
    return args


@contextmanager
def engine(**arguments: Any) -> Iterator[Any]:
    """Start an sglang.Engine, and shut it down at the end."""
    import sglang

    server = sglang.Engine(**arguments)
    try:
        yield server
    finally:
        server.shutdown()


def answers(name: str, server: Any, prompts: Sequence[list[int]], new_tokens: int) -> list[Answer]:
    """Return greedy answers; all prompts are sent at once."""
    outputs = server.generate(
        input_ids=list(prompts),
        sampling_params=greedy(new_tokens),
        return_logprob=True,
        top_logprobs_num=2,
    )
    console.print(f"{name}: {len(outputs)} answers")
    return [
        Answer(
            output["output_ids"],
            [two[0][0] - two[1][0] for two in output["meta_info"]["output_top_logprobs"]],
            [
                frozenset((two[0][1], two[1][1]))
                for two in output["meta_info"]["output_top_logprobs"]
            ],
        )
        for output in outputs
    ]


def tokens_alone(server: Any, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Return the tokens of greedy answers without log-probabilities. The prefix cache is flushed
    first."""
    server.flush_cache()
    outputs = server.generate(input_ids=list(prompts), sampling_params=greedy(new_tokens))
    return [output["output_ids"] for output in outputs]


def greedy(new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}


def compare(name: str, ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[Figure]:
    """Return how many answers differ, how many of them differ beyond a tie or between other pairs
    of tokens on both sides, and the gaps at the first differing tokens."""
    gaps, other_pairs = [], 0
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        pairs = enumerate(zip(a.tokens, b.tokens, strict=True))
        place = next((i for i, (x, y) in pairs if x != y), None)
        if place is not None:
            gap = max(a.gaps[place], b.gaps[place])
            gaps.append(gap)
            other_pairs += a.pairs[place] != b.pairs[place]
            console.print(f"{name}: prompt {index} differs from token {place} on, gap {gap:.4f}")
    beyond = sum(gap > TIE_GAP for gap in gaps)
    console.print(f"{name}: {len(gaps)} of {len(ours)} answers differ, {beyond} beyond a tie")
    figures = [
        Figure(name, len(gaps), f"of {len(ours)} answers", None, 0),
        Figure(f"{name}.beyond_a_tie", beyond, f"of {len(ours)} answers", None, 0),
        Figure(f"{name}.other_pairs", other_pairs, f"of {len(gaps)} first differences", None, 0),
    ]
    if gaps:
        figures += [
            Figure(f"{name}.largest_gap", max(gaps), "log-probability"),
            Figure(f"{name}.median_gap", statistics.median(gaps), "log-probability"),
        ]
    return figures


if __name__ == "__main__":
    main()
