"""Measure drafts of a step where n-grams propose them, on text that repeats and text that does not.

    python benchmarks/bench_ngram.py [MODEL ...]

Prompts are cut from the files of this repository that FILES names. `edit` and `quote` ask for text
of the prompt again, `code` and `prose` for its continuation. With --kvspec-drafter self, a draft
step makes one draft.

- `text`: no model. Drafts are a real text: the file with a name changed, the page again, or what
  follows in the file.
- `greedy` and `sampled`: answers of a CPU server. A server without proposals answers, too. Both
  draft 16 tokens before a verification, so that drafts are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from acceptance.report import Estimate, Figure, write_json
from bench_gpu_identity import engine
from rich.console import Console

from sglang_kvspec.planning.proposals import RequestNgrams

ROOT = Path(__file__).resolve().parents[1]
CODE = (
    "sglang_kvspec/planning/rounds.py",
    "sglang_kvspec/planning/residency.py",
    "sglang_kvspec/planning/capacity.py",
    "sglang_kvspec/engine/loop.py",
    "sglang_kvspec/engine/verifier.py",
    "sglang_kvspec/kv/reference_cache.py",
    "sglang_kvspec/runtime/sampling.py",
    "sglang_kvspec/door/app.py",
)
PROSE = (
    "README.md",
    "docs/concepts/rounds.md",
    "docs/concepts/lossless.md",
    "docs/concepts/anchors-and-residuals.md",
    "docs/guides/disaggregation.md",
    "docs/guides/host-offload.md",
    "docs/guides/prefix-server.md",
    "docs/guides/monitoring.md",
)
FILES = {"edit": CODE, "quote": PROSE, "code": CODE, "prose": PROSE}
# Text between a text and the start of its repetition.
REQUESTS = {
    "edit": "\n\n# The same file, with comments added:\n\n",
    "quote": "\n\nThe page again, word for word:\n\n",
}
# Characters of a text that the prompt repeats, for the model to go on with.
REPEATED = 160
# Change of `edit` where no model makes one.
RENAMED = ("state", "entry")
SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "sampling_seed": 1},
}
DRAFT_LEN = 16
# Tokens of a text that drafts are taken from, where no model makes them.
TEXT_TOKENS = 400

console = Console(width=110)


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: of the answer. told: entry `kvspec` of its meta_info."""

    tokens: list[int]
    told: dict[str, Any]

    @property
    def tokens_per_step(self) -> float:
        return float(self.told["ngram"]["tokens_per_step"])


# By kind of prompt and by sampling.
Answers = dict[tuple[str, str], list[Answer]]


def main() -> None:
    args = parse_arguments()
    figures = []
    for model in args.models:
        console.print(f"{model.name}:")
        figures += text_figures(model, args)
        figures += figures_of(model.name, *answers_of(model, args))
    settings = {
        "models": [model.name for model in args.models],
        "prompt_tokens": args.length,
        "new_tokens": args.new_tokens,
        "text_tokens": TEXT_TOKENS,
        "draft_len": DRAFT_LEN,
        "files": FILES,
        "sampling": dict(SAMPLING),
        "requests_at_once": args.concurrency,
        "spread": "95% half width over prompts",
    }
    write_json(args.out, "ngram", torch.device("cpu"), settings, figures)
    for figure in figures:
        spread = "" if figure.spread is None else f" ± {figure.spread:.2f}"
        console.print(f"{figure.name}: {figure.value:.2f}{spread} {figure.unit}")
    console.print(f"written: {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    models = [ROOT / "models" / "demo-5m"]
    larger = ROOT.parent / "shared" / "models" / "eval-31m"
    if larger.exists():
        models.append(larger)
    add("models", type=Path, nargs="*", default=models, help="folders of models")
    add("--length", type=int, default=1000, help="tokens of a prompt")
    add("--new-tokens", type=int, default=96)
    add("--concurrency", type=int, default=8, help="requests at a time")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "ngram_cpu.json")
    return parser.parse_args()


def _tokenizer(model: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json"))


def prompts_of(model: Path, kind: str, length: int) -> list[list[int]]:
    """Return a prompt of `length` tokens for each file of a kind."""
    tokenizer = _tokenizer(model)
    prompts = []
    for name in FILES[kind]:
        ids = tokenizer.encode((ROOT / name).read_text(encoding="utf-8")).ids
        if kind not in REQUESTS:
            prompts.append(ids[:length])
            continue
        start = tokenizer.decode(ids)[:REPEATED]
        asked = tokenizer.encode(REQUESTS[kind] + start).ids
        prompts.append([*ids[: length - len(asked)], *asked])
    return prompts


def text_figures(model: Path, args: argparse.Namespace) -> list[Figure]:
    """Return drafts of a step where the drafts are real text in the model's tokens."""
    tokenizer = _tokenizer(model)
    figures = []
    for kind, names in FILES.items():
        found = []
        for name in names:
            text = (ROOT / name).read_text(encoding="utf-8")
            ids = tokenizer.encode(text).ids
            prompt, again = ids[: args.length], text.replace(*RENAMED) if kind == "edit" else text
            answer = ids[args.length :] if kind not in REQUESTS else tokenizer.encode(again).ids
            found.append(steps_of(prompt, answer[:TEXT_TOKENS]))
        got = Estimate.of(torch.tensor(found))
        name = f"ngram.tokens_per_step.{kind}.text.{model.name}"
        figures.append(Figure(name, got.mean, "drafts", got.half_width, 1.0))
    return figures


def steps_of(prompt: list[int], answer: list[int]) -> float:
    """Return the mean drafts of a step where a model drafts `answer`, in rounds whose drafts are
    all accepted."""
    ngrams, steps, drafted = RequestNgrams(), 0, 0
    while drafted < len(answer):
        output, drafts = answer[:drafted], answer[drafted : drafted + DRAFT_LEN]
        ngrams.follow(prompt, output)
        made = 0
        while made < len(drafts):
            proposal = ngrams.propose(drafts[:made], len(drafts) - made - 1)
            pairs = zip(proposal.tokens, drafts[made:], strict=False)
            kept = next((n for n, (a, b) in enumerate(pairs) if a != b), len(proposal.tokens))
            ngrams.observe(proposal, kept)
            made += kept + 1
            steps += 1
        drafted += len(drafts)
    return drafted / steps


def answers_of(model: Path, args: argparse.Namespace) -> tuple[Answers, Answers]:
    """Return the answers of a server without proposals, and of one with them."""
    common = {
        "model_path": str(model),
        "log_level": "error",
        "random_seed": 0,
        "device": "cpu",
        "dtype": "float32",
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.1,
        "max_total_tokens": 16384,
        "max_running_requests": args.concurrency,
        "kvspec": True,
        "kvspec_draft_len": DRAFT_LEN,
    }
    found: list[Answers] = []
    for drafter in ("self", "ngram"):
        with engine(**common, kvspec_drafter=drafter) as server:
            found.append(
                {
                    (kind, how): _ask(server, prompts_of(model, kind, args.length), params, args)
                    for kind in FILES
                    for how, params in SAMPLING.items()
                }
            )
        console.print(f"  {drafter}: {sum(map(len, found[-1].values()))} answers")
    without, with_ngrams = found
    return without, with_ngrams


def _ask(
    server: Any, prompts: Sequence[list[int]], params: dict[str, Any], args: argparse.Namespace
) -> list[Answer]:
    params = {**params, "max_new_tokens": args.new_tokens, "ignore_eos": True}
    outputs = server.generate(input_ids=list(prompts), sampling_params=params)
    return [Answer(each["output_ids"], each["meta_info"]["kvspec"]) for each in outputs]


def figures_of(model: str, without: Answers, with_ngrams: Answers) -> list[Figure]:
    """Return drafts of a step by kind of prompt, and how many answers differ in all."""
    figures, differ, num_answers = [], 0, 0
    for (kind, how), answers in with_ngrams.items():
        name = f"{kind}.{how}.{model}"
        got = Estimate.of(torch.tensor([answer.tokens_per_step for answer in answers]))
        figures.append(
            Figure(f"ngram.tokens_per_step.{name}", got.mean, "drafts", got.half_width, 1.0)
        )
        told = [answer.told["ngram"] for answer in answers]
        proposed, kept = (sum(each[key] for each in told) for key in ("proposed", "kept"))
        share = kept / proposed if proposed else 0.0
        figures.append(Figure(f"ngram.kept_share.{name}", share, "of proposals"))
        pairs = list(zip(answers, without[kind, how], strict=True))
        differ += sum(ours.tokens != theirs.tokens for ours, theirs in pairs)
        num_answers += len(pairs)
        accepted = sum(ours.told["accepted"] for ours, _ in pairs)
        of_self = sum(theirs.told["accepted"] for _, theirs in pairs)
        figures.append(Figure(f"ngram.accepted.{name}", accepted, "drafts", None, of_self))
    unit = f"of {num_answers} answers"
    return [*figures, Figure(f"ngram.mismatches.{model}", differ, unit, None, 0)]


if __name__ == "__main__":
    main()
