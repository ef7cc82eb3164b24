"""Compare answers of every scorer and codec with plain SGLang's.

    python benchmarks/check_compressors.py [METHOD ...] [--file SCORER=PATH ...]
        [--more kvpress:press=SnapKVPress ...] [--jobs N] [--out RESULT.json]

Each method has a CPU server of its own, with --kvspec-compressor or --kvspec-codec, in fp32. The
scorers of tests/plugins, which choose as badly as they can, are methods too. Methods whose name
ends in .freed also free the anchors that drafts do not read; their answers count as
compressors.freed.identity. Each server answers prompts one at a time, all at once, and continued
behind their cached prefix. A scorer that needs a file is left out, and recorded with the reason,
unless --file names one. --more: further values of --kvspec-compressor, such as presses of kvpress.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import requests
import torch
from acceptance.prompts import cut_prompts
from acceptance.report import Figure, write_json
from rich.console import Console
from serving.live_server import kvspec_of

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess
from sglang_kvspec.core.compressor import parse_compressor
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import CODECS, SCORERS
from sglang_kvspec.scorers.making import make_scorer

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "demo-5m"
PLUGINS = ROOT / "tests" / "plugins"
ADVERSARIAL = ("keeps_nothing", "keeps_the_wrong_half", "changes_its_mind")
FREEING = ("streaming", "snapkv", "kvzip", "tova", *ADVERSARIAL)
# Lengths that end a page, that begin one, and of several chunks of 512 tokens.
PROMPT_LENS = (128, 193, 300, 700, 1111, 1500)
MORE_TOKENS, NEW_TOKENS = 40, 48
BUDGET = 0.1
COMMON = (f"--model-path={MODEL}", "--max-total-tokens=16384", "--chunked-prefill-size=512")
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 600.0, 300.0
console = Console(width=110)


@dataclass(frozen=True, slots=True)
class Method:
    """Flags of one method, and the reason if it cannot be tried."""

    name: str
    flags: tuple[str, ...] = ()
    problem: str = ""


@dataclass(slots=True)
class Outcome:
    """Answers of one method. drafted, accepted: numbers of tokens."""

    answers: int
    mismatches: int
    drafted: int
    accepted: int
    share_read: float
    raw: list[list[int]] = field(default_factory=list)


def main() -> int:
    args = parse_arguments()
    asked = prompts()
    expected = ask_server(Method("plain"), asked, [], args.logs).raw
    methods = [*all_methods(args.file), *map(scorer_method, args.more)]
    chosen = [method for method in methods if not args.methods or method.name in args.methods]
    found: dict[str, dict[str, Any]] = {
        each.name: {"problem": each.problem or "not tried"} for each in chosen
    }
    tried = [method for method in chosen if not method.problem]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = {pool.submit(ask_server, each, asked, expected, args.logs): each for each in tried}
        for run in as_completed(runs):
            method, outcome = runs[run], run.result()
            measured = {key: value for key, value in asdict(outcome).items() if key != "raw"}
            found[method.name] = {"flags": method.flags, **measured}
            console.print(f"{method.name}: {measured}")
            write(args.out, found)
    for method in chosen:
        if method.problem:
            console.print(f"{method.name}: left out: {method.problem}")
    return write(args.out, found)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("methods", nargs="*", metavar="METHOD")
    add("--more", nargs="*", default=[], metavar="VALUE", help="values of --kvspec-compressor")
    add("--jobs", type=int, default=1, help="servers at the same time (default: %(default)s)")
    add("--file", nargs="*", default=[], metavar="SCORER=PATH", help="files of scorers")
    results = ROOT / "benchmarks" / "results"
    add("--out", type=Path, default=results / "compressor_identity.json")
    add("--logs", type=Path, default=ROOT / ".kvspec" / "compressors")
    return parser.parse_args()


def all_methods(files: Sequence[str]) -> list[Method]:
    """Return every scorer and every codec at each of its widths."""
    of = dict(file.split("=", 1) for file in files)
    methods = []
    for name in SCORERS.names():
        text = f"{name}:file={of[name]}" if name in of else name
        try:
            make_scorer(parse_compressor(text))
        except ConfigError as error:
            methods.append(Method(name, problem=str(error)))
            continue
        methods.append(scorer_method(text))
    methods += map(scorer_method, ADVERSARIAL)
    methods += (scorer_method(f"{name}:keep_anchors=false") for name in FREEING)
    for name in CODECS.names():
        for bits in CODECS.load(name).bit_choices:
            flags = (f"--kvspec-codec={name}", f"--kvspec-anchor-bits={bits}")
            methods.append(Method(f"{name}.{bits}", flags))
    return methods


def scorer_method(text: str) -> Method:
    """Return the method of a value of --kvspec-compressor."""
    compressor = parse_compressor(text)
    press = compressor.options.get("press")
    name = compressor.name if press is None else f"{compressor.name}.{press}"
    if not compressor.keep_anchors:
        name += ".freed"
    flags = (f"--kvspec-compressor={text}", f"--kvspec-draft-budget={BUDGET}")
    return Method(name, flags)


def prompts() -> list[list[int]]:
    """Return prompts of all lengths, each with the tokens that continue it."""
    longest = max(PROMPT_LENS) + MORE_TOKENS
    cut, _ = cut_prompts(MODEL, len(PROMPT_LENS), longest, 0, "code")
    tokens = cut.tolist()
    return [text[: n + MORE_TOKENS] for text, n in zip(tokens, PROMPT_LENS, strict=True)]


def ask_server(
    method: Method, asked: Sequence[list[int]], expected: Sequence[list[int]], logs: Path
) -> Outcome:
    """Start a server and compare its answers. expected: answers of plain SGLang; empty for plain
    SGLang itself."""
    flags = () if method.name == "plain" else ("--kvspec", *method.flags)
    paths = [str(PLUGINS), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    server = ServerProcess(
        (*CPU_ARGUMENTS, *COMMON, *flags),
        log_path=logs / f"{method.name}.log",
        environment=environment,
    )
    shorter = [prompt[:-MORE_TOKENS] for prompt in asked]
    with server:
        server.wait_healthy(START_TIMEOUT_S)
        answers = [ask(server, prompt) for prompt in shorter]
        if method.name == "plain":
            answers += [ask(server, prompt) for prompt in asked]
            return Outcome(len(answers), 0, 0, 0, 1.0, answers)
        first, later = expected[: len(asked)], expected[len(asked) :]
        answers += [ask(server, prompt) for prompt in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers += pool.map(lambda prompt: ask(server, prompt), [*shorter, *asked])
        wanted = [*first, *later] * 2
        report = kvspec_of(
            requests.get(f"{server.base_url}/server_info", timeout=ANSWER_TIMEOUT_S).json()
        )
    differ = sum(a != b for a, b in zip(answers, wanted, strict=True))
    counters = report["counters"]
    share = report["draft_reads"]["share"]
    return Outcome(len(answers), differ, counters["drafted"], counters["accepted"], share)


def ask(server: ServerProcess, prompt: Sequence[int]) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": params}
    reply = requests.post(f"{server.base_url}/generate", json=body, timeout=ANSWER_TIMEOUT_S)
    reply.raise_for_status()
    return list(reply.json()["output_ids"])


def write(path: Path, found: dict[str, dict[str, Any]]) -> int:
    """Write the result of the methods so far. Return the exit code: 1 if an answer differs."""
    tried = {name: each for name, each in found.items() if "answers" in each}
    freeing = {name: tried[name] for name in tried if name.endswith(".freed")}
    keeping = {name: tried[name] for name in tried if name not in freeing}
    figures = figures_of("compressors.identity", keeping) if keeping or not freeing else []
    figures += figures_of("compressors.freed.identity", freeing) if freeing else []
    presses = sum(name.startswith("kvpress.") for name in tried)
    if presses:
        figures.append(Figure("compressors.kvpress", presses, "presses"))
    settings = {
        "model": MODEL.name,
        "prompt_lens": PROMPT_LENS,
        "new_tokens": NEW_TOKENS,
        "draft_budget": BUDGET,
        "methods": found,
    }
    write_json(path, "check_compressors", torch.device("cpu"), settings, figures)
    return 1 if not tried or any(each["mismatches"] for each in tried.values()) else 0


def figures_of(name: str, tried: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    mismatches, answers = (
        sum(each[key] for each in tried.values()) for key in ("mismatches", "answers")
    )
    return [
        Figure(f"{name}.mismatches", mismatches, f"of {answers} answers", None, 0),
        Figure(f"{name}.methods", len(tried), "methods"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
