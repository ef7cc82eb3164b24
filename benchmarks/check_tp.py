"""Compare a server of several ranks with plain SGLang, with drafting off, and with faulty ranks.

usage: python benchmarks/check_tp.py [--model PATH] [--ranks N] [--targets exact int8] [--cpu]
       python benchmarks/check_tp.py --deterministic

Needs as many GPUs as ranks, or none with --cpu. In one run, a fault of tests/sglang/faults makes
every rank but rank 0 choose other tokens and draft lengths. Answers stay right only if all ranks
use what rank 0 broadcasts. Greedy answers in bf16 may differ at ties (bench_gpu_identity.py);
seeded answers that differ are only counted. Exits with 1 if a greedy answer differs beyond a tie.
With --cpu (float32), any difference is an error. --deterministic: servers run with
--enable-deterministic-inference, and any difference between two runs of KVSpec is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_gpu_identity import Answer, compare, prompts_of_all_lengths
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "sglang" / "faults"
SEED = 7

console = Console(width=110)


@dataclass(frozen=True, slots=True)
class Run:
    """Answers to all prompts, sent at once. greedy: the first answers; cached: greedy again, over
    cached prefixes; seeded: sampled with a fixed seed."""

    greedy: list[Answer]
    cached: list[Answer]
    seeded: list[list[int]]


def main() -> None:
    args = parse_arguments()
    prompts = prompts_of_all_lengths(args.model, args.prompts, args.longest)
    on_gpu = {"dtype": "bfloat16", "mem_fraction_static": 0.5}
    on_cpu = {
        **{"device": "cpu", "dtype": "float32", "mem_fraction_static": 0.1},
        **{"max_total_tokens": 24576, "disable_overlap_schedule": True},
    }
    common: dict[str, Any] = {
        **(on_cpu if args.cpu else on_gpu),
        "model_path": str(args.model),
        "tp_size": args.ranks,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "disable_prefill_cuda_graph": True,
        "page_size": 64,
        "random_seed": 0,
        "log_level": "error",
        **({"enable_deterministic_inference": True} if args.deterministic else {}),
        **json.loads(args.engine_args),
    }
    flashinfer = {} if args.cpu else {"attention_backend": "flashinfer"}
    plain = None
    if not args.skip_plain:
        plain = run("plain", prompts, args.new_tokens, flashinfer | common)
    strict = args.cpu or args.deterministic
    wrong = 0
    for target in args.targets:
        ours = common | {"kvspec": True, "kvspec_target": target, "kvspec_codec": args.codec}
        drafting = ours | {"kvspec_draft_len": args.draft_len}
        off = run(
            f"{target}, drafting off", prompts, args.new_tokens, ours | {"kvspec_draft_len": 0}
        )
        on = run(target, prompts, args.new_tokens, drafting)
        with other_ranks_err():
            erring = run(f"{target}, other ranks err", prompts, args.new_tokens, drafting)
        wrong += parted(f"{target} against drafting off", on, off, strict)
        wrong += parted(f"{target}, other ranks err, against no fault", erring, on, strict)
        if target == "exact" and plain is not None:
            wrong += parted("exact against plain", on, plain, args.cpu, same_noise=False)
    console.print("all answers are right" if wrong == 0 else f"{wrong} answers are wrong")
    sys.exit(wrong > 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo-5m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="run all ranks on this machine's CPU")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--codec", default="uniform4")
    parser.add_argument("--draft-len", default="auto")
    parser.add_argument(
        "--engine-args", default="{}", help="further arguments of every sglang.Engine, as JSON"
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument(
        "--skip-plain", action="store_true", help="skip the comparison with plain SGLang"
    )
    parser.add_argument("--targets", nargs="+", default=["exact"])
    return parser.parse_args()


def run(name: str, prompts: Sequence[list[int]], new_tokens: int, arguments: dict[str, Any]) -> Run:
    """Return the answers of a fresh engine."""
    import sglang

    begin = time.perf_counter()
    engine = sglang.Engine(**arguments)
    try:
        started = time.perf_counter()
        length = {"max_new_tokens": new_tokens, "ignore_eos": True}
        greedy, cached = (
            engine.generate(
                input_ids=list(prompts),
                sampling_params={"temperature": 0.0, **length},
                return_logprob=True,
                top_logprobs_num=2,
            )
            for _ in range(2)
        )
        seeded = engine.generate(
            input_ids=list(prompts),
            sampling_params={"temperature": 0.8, "sampling_seed": SEED, **length},
        )
        report = engine.get_server_info()["internal_states"][0].get("kvspec")
        if report is not None:
            check_report(report, arguments)
    finally:
        engine.shutdown()
    counts = ""
    if report is not None:
        counters = report["counters"]
        counts = f", {counters['accepted']} of {counters['drafted']} drafts accepted"
    console.print(
        f"{name}: started in {started - begin:.0f} s, answered in "
        f"{time.perf_counter() - started:.0f} s{counts}"
    )
    return Run(
        [_answer(output) for output in greedy],
        [_answer(output) for output in cached],
        [output["output_ids"] for output in seeded],
    )


def _answer(output: dict[str, Any]) -> Answer:
    top = output["meta_info"]["output_top_logprobs"]
    return Answer(output["output_ids"], [two[0][0] - two[1][0] for two in top])


def check_report(report: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Check the report of an idle engine: its ranks, no window page in use, and drafts if and only
    if drafting is on."""
    assert report["ranks"] == arguments["tp_size"]
    assert report["pools"]["window_pages_used"] == 0, report["pools"]
    drafted = report["counters"]["drafted"]
    assert (drafted > 0) == (arguments["kvspec_draft_len"] != 0), report["counters"]


def parted(name: str, ours: Run, theirs: Run, exact: bool, same_noise: bool = True) -> int:
    """Return how many answers of `ours` are wrong. exact: a tie counts as wrong, too. same_noise:
    compare seeded answers, too; a difference counts as wrong if `exact`."""
    wrong = 0
    for kind in ("greedy", "cached"):
        figures = compare(f"{name}, {kind}", getattr(ours, kind), getattr(theirs, kind))
        wrong += int(figures[0 if exact else 1].value)
    if same_noise:
        differ = sum(a != b for a, b in zip(ours.seeded, theirs.seeded, strict=True))
        console.print(f"{name}, seeded: {differ} of {len(ours.seeded)} answers differ")
        wrong += differ if exact else 0
    return wrong


@contextmanager
def other_ranks_err() -> Iterator[None]:
    """Start engines in which every rank but rank 0 chooses wrongly."""
    with tempfile.TemporaryDirectory() as folder:
        faults = Path(folder) / "active"
        faults.write_text("ranks_differ")
        os.environ["KVSPEC_FAULT_FILE"] = str(faults)
        # Spawned processes look for plug-ins on the sys.path of this process.
        sys.path.append(str(FAULTS))
        try:
            yield
            assert faults.with_suffix(".fired").exists(), "the fault ranks_differ did not fire"
        finally:
            sys.path.remove(str(FAULTS))
            del os.environ["KVSPEC_FAULT_FILE"]


if __name__ == "__main__":
    main()
