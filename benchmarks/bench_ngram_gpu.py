"""Measure the speed of --kvspec-drafter ngram against self, on text that repeats and other text.

    python benchmarks/bench_ngram_gpu.py eval-31m smollm2-135m --commit COMMIT --out PATH

Arguments are folders of models. For each model, one server of each drafter is started, all at once
on one GPU. They answer the same prompts in turn: a pair is one pass of each. Rates are of tokens a
second from cached prompts, greedy.

- `repeating`: edit a file, quote a document. bench_ngram.py cuts the prompts from this repository.
- `other`: go on with a file or a page. A model that knows chat templates answers questions instead.

Figures without a model's name are those of the last model, with the first number of requests at
once. `tokens_per_step` counts all draft steps, also those to which nothing was proposed.
`proposing_share` is the share of steps to which n-grams proposed tokens, `mean_proposed` how many
these were. `step_ms` has the times by which the server chose, see docs/guides/monitoring.md. With
--always, the server proposes wherever n-grams match, so that its choice can be judged.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import requests
import torch
from acceptance.report import Figure, write_json
from bench_ngram import FILES, ROOT, prompts_of
from rich.console import Console
from serving.environment import server_environment
from serving.live_server import kvspec_of
from tokenizers import Tokenizer

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess

DRAFTERS = ("self", "ngram")
COUNTS = ("steps", "proposing", "proposed", "kept")
KINDS = {"repeating": ("edit", "quote"), "other": ("code", "prose")}
ASKED = {
    "edit": "Here is a file. Write the same file again, and add a comment to each function.\n\n",
    "quote": "Here is a document. Quote it word for word.\n\n",
}
QUESTIONS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how a bicycle stays upright, to a child.",
    "Describe a market in a small town on a rainy morning.",
    "Give advice to somebody who moves to a new city.",
    "Tell me about the history of bread.",
    "Why is the sky red in the evening?",
    "Write a letter to a friend about a walk in the mountains.",
    "What should a team do before a product is released?",
)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ON_GPU = (
    "--dtype=bfloat16",
    "--random-seed=0",
    "--sampling-backend=pytorch",
    "--disable-prefill-cuda-graph",
    # Several servers share the GPU, and --max-total-tokens decides what each takes.
    "--mem-fraction-static=0.8",
    # Servers that wait for their turn leave the cores to the other.
    "--sleep-on-idle",
)
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0
PAGE = 64
WARM_UP_TOKENS = 24

console = Console(width=110)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a server over its prompts. tokens: of each answer. counts: of proposals in this
    pass. step_ms: times that the server expected afterwards, by the number of requests."""

    tokens_per_s: float
    tokens: list[list[int]]
    counts: dict[str, int]
    step_ms: dict[str, dict[str, float]]

    def ratio(self, name: str, over: str) -> float | None:
        """Return the ratio of two counts, None where the latter is 0."""
        return self.counts[name] / self.counts[over] if self.counts[over] else None


@dataclass(slots=True)
class Measured:
    """Passes of both drafters with one model, kind of prompt and number of requests at once."""

    model: str
    kind: str
    concurrency: int
    passes: dict[str, list[Pass]] = field(default_factory=lambda: defaultdict(list))

    def figures(self, *, is_main: bool) -> list[Figure]:
        """Return the figures of whole pairs. is_main: also under names without the model."""
        pairs = list(zip(*(self.passes[name] for name in DRAFTERS), strict=False))
        if not pairs:
            return []
        place = f"{self.model}.c{self.concurrency}"
        ratios = [ours.tokens_per_s / own.tokens_per_s for own, ours in pairs]
        rate = median(own.tokens_per_s for own, _ in pairs)
        unit = f"x self, tokens/s, median of {len(pairs)} pairs"
        spread = (max(ratios) - min(ratios)) / 2
        name = f"ngram.vs_self.{self.kind}"
        found = [(name, Figure(f"{name}.{place}", median(ratios), unit, spread, 1.0))]
        found += self._counted([ours for _, ours in pairs], place)
        figures = [figure for _, figure in found]
        if is_main:
            figures += [Figure(n, f.value, f.unit, f.spread, f.baseline) for n, f in found]
        of_self = Figure(f"ngram.self_tokens_per_s.{self.kind}.{place}", rate, "tokens/s")
        differ = sum(
            a != b for own, ours in pairs for a, b in zip(own.tokens, ours.tokens, strict=True)
        )
        count = sum(len(own.tokens) for own, _ in pairs)
        times_ms = pairs[-1][1].step_ms.get(str(self.concurrency), {})
        figures += [
            Figure(f"ngram.step_ms.{each}.{self.kind}.{place}", ms, "ms")
            for each, ms in times_ms.items()
        ]
        name = f"ngram.mismatches.{self.kind}.{place}"
        return [*figures, of_self, Figure(name, differ, f"of {count} answers", None, 0)]

    def _counted(self, passes: Sequence[Pass], place: str) -> list[tuple[str, Figure]]:
        """Return the figures of draft steps, by their names without a model."""
        found = []
        for name, count, over, plus, unit, baseline in (
            ("tokens_per_step", "kept", "steps", 1.0, "drafts of a step", 1.0),
            ("proposing_share", "proposing", "steps", 0.0, "of all draft steps", None),
            ("mean_proposed", "proposed", "proposing", 0.0, "tokens, where any", None),
        ):
            ratios = [each.ratio(count, over) for each in passes]
            values = [plus + ratio for ratio in ratios if ratio is not None]
            if not values:
                continue
            full = f"ngram.{name}" if self.kind == "repeating" else f"ngram.{name}.{self.kind}"
            half = (max(values) - min(values)) / 2
            found.append((full, Figure(f"{full}.{place}", median(values), unit, half, baseline)))
        return found


class Server(ServerProcess):
    """Server of one model and drafter."""

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = requests.post(f"{self.base_url}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
        reply.raise_for_status()
        return dict(reply.json())

    def ngram_report(self) -> dict[str, Any]:
        """Return the counts of proposals so far, and times of steps."""
        reply = requests.get(f"{self.base_url}/server_info", timeout=REQUEST_TIMEOUT_S)
        reply.raise_for_status()
        return dict(kvspec_of(reply.json())["ngram"])

    def answer(self, prompts: Sequence[list[int]], new_tokens: int, concurrency: int) -> Pass:
        """Answer all prompts, with so many requests at a time."""
        params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        before = self.ngram_report()
        begin = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            bodies = [{"input_ids": prompt, "sampling_params": params} for prompt in prompts]
            answers = list(pool.map(self.post, bodies))
        seconds = time.perf_counter() - begin
        tokens = [list(answer["output_ids"]) for answer in answers]
        after = self.ngram_report()
        counts = {name: after[name] - before[name] for name in COUNTS}
        return Pass(sum(map(len, tokens)) / seconds, tokens, counts, after["step_ms"])


def main() -> None:
    args = parse_arguments()
    deadline = time.monotonic() + args.time_limit
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        environment = server_environment(Path(scratch), None)
        servers = {}
        for model in args.models:
            for drafter in DRAFTERS:
                server = Server(
                    arguments_of(model, drafter, args),
                    log_path=args.logs / f"{model.name}-{drafter}.log",
                    environment=environment,
                )
                servers[model, drafter] = stack.enter_context(server)
        begin = time.monotonic()
        for server in servers.values():
            server.wait_healthy(START_TIMEOUT_S)
        console.print(f"{len(servers)} servers after {time.monotonic() - begin:.0f} s")
        for model in args.models:
            of_model = [servers[model, drafter] for drafter in DRAFTERS]
            measure(model, of_model, args, deadline, results)
    for figure in write(args, results):
        spread = "" if figure.spread is None else f" ± {figure.spread:.2f}"
        console.print(f"{figure.name}: {figure.value:.2f}{spread} {figure.unit}")
    console.print(f"written: {args.out}")


def measure(
    model: Path,
    servers: Sequence[Server],
    args: argparse.Namespace,
    deadline: float,
    results: list[Measured],
) -> None:
    """Add the passes of a model's servers to `results`, and write after each pair. Stops at the
    deadline (time.monotonic())."""
    prompts = {kind: prompts_for(model, kind, args) for kind in KINDS}
    for server in servers:
        # Cache the prompts, and let every kernel run once.
        for asked in prompts.values():
            for concurrency in args.concurrency:
                server.answer(asked, WARM_UP_TOKENS, concurrency)
    of_model = [Measured(model.name, kind, n) for n in args.concurrency for kind in KINDS]
    results += of_model
    for number in range(args.pairs):
        for each in of_model:
            if time.monotonic() > deadline:
                console.print(f"the time limit ends {model.name} in pair {number + 1}")
                return
            for drafter, server in zip(DRAFTERS, servers, strict=True):
                done = server.answer(prompts[each.kind], args.new_tokens, each.concurrency)
                each.passes[drafter].append(done)
        write(args, results)


def write(args: argparse.Namespace, results: Sequence[Measured]) -> list[Figure]:
    """Write the figures of all pairs so far, and return them."""
    main_point = (args.models[-1].name, args.concurrency[0])
    figures = [
        figure
        for each in results
        for figure in each.figures(is_main=(each.model, each.concurrency) == main_point)
    ]
    settings = {
        "models": [model.name for model in args.models],
        "prompt_tokens": args.length,
        "new_tokens": args.new_tokens,
        "draft_len": args.draft_len,
        "always": args.always,
        "requests_at_once": args.concurrency,
        "pairs": args.pairs,
        "kinds": KINDS,
        "spread": "half the range over pairs",
    }
    device = torch.device("cpu" if args.cpu else "cuda")
    write_json(args.out, "ngram_gpu", device, settings, figures, commit=args.commit)
    return figures


def arguments_of(model: Path, drafter: str, args: argparse.Namespace) -> list[str]:
    """Return the arguments of a server."""
    most = max(args.concurrency)
    # All prompts stay cached.
    num_prompts = sum(len(FILES[name]) for names in KINDS.values() for name in names)
    pool_tokens = (num_prompts + most) * (args.length + args.new_tokens + 2 * PAGE)
    return [
        f"--model-path={model}",
        *(CPU_ARGUMENTS if args.cpu else ON_GPU),
        "--kvspec",
        f"--kvspec-draft-len={args.draft_len}",
        f"--kvspec-drafter={drafter}",
        *(["--kvspec-ngram-always=true"] if args.always and drafter == "ngram" else []),
        f"--page-size={PAGE}",
        f"--max-running-requests={most}",
        f"--max-total-tokens={-(-pool_tokens // PAGE) * PAGE}",
        "--log-level=warning",
    ]


def prompts_for(model: Path, kind: str, args: argparse.Namespace) -> list[list[int]]:
    """Return the prompts of a kind, as chats for a model that knows the template."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    if tokenizer.token_to_id("<|im_start|>") is None:
        prompts = [ids for name in KINDS[kind] for ids in prompts_of(model, name, args.length)]
    elif kind == "other":
        prompts = [tokenizer.encode(CHAT.format(question)).ids for question in QUESTIONS]
    else:
        prompts = []
        for name in KINDS[kind]:
            for path in FILES[name]:
                ids = tokenizer.encode((ROOT / path).read_text(encoding="utf-8")).ids
                text = tokenizer.decode(ids[: args.length - 64])
                prompts.append(tokenizer.encode(CHAT.format(ASKED[name] + text)).ids)
    return prompts[: args.prompts]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("models", type=Path, nargs="+", help="folders of models")
    add("--length", type=int, default=1000, help="tokens of a prompt")
    add("--new-tokens", type=int, default=128)
    add("--draft-len", type=int, default=16)
    add("--prompts", type=int, default=16, help="most prompts of a kind")
    add("--concurrency", type=int, nargs="+", default=[1, 4], help="requests at a time")
    add("--pairs", type=int, default=5)
    add("--time-limit", type=float, default=150.0, help="seconds after which no pass begins")
    add("--always", action="store_true", help="propose also where that does not pay")
    add("--cpu", action="store_true", help="run the servers on this machine's CPU")
    add("--logs", type=Path, default=ROOT / ".kvspec" / "ngram_gpu", help="folder for logs")
    add("--commit", help="commit to record (default: what git reports)")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "ngram_gpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
