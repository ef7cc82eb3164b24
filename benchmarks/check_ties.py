"""Measure whether answers that differ in an identity run part at a tie of fp32.

    python benchmarks/check_ties.py PART.json ... --out benchmarks/results/identity_ties.json

A verification computes several rows in one matrix product, and a plain step one row. Their sums
run in another order, so log-probabilities differ by a few units in the last place. Where the two
best tokens are closer than that, either may win, also in plain SGLang with other requests beside.

For each differing answer, the reference server and the drafting server continue the prompt again,
with log-probabilities. Their largest difference before the answers part is the noise of a
log-probability. The answers part at a tie if, on both servers, the two tokens are no further apart
than twice that noise, and no further than LIMIT.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import requests
import torch
from acceptance.report import Figure, write_json
from tokenizers import Tokenizer

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "sglang"))

from harness.models import DEMO_MODEL, EVAL_MODEL  # noqa: E402 - test code, which is no package
from harness.prompts import source_path  # noqa: E402
from harness.references import Setting  # noqa: E402

MODELS = {model.name: model for model in (DEMO_MODEL, EVAL_MODEL)}
# 64 units in the last place of a logit below 16. A wrong page of KV changes logits by far more.
LIMIT = 64 * 2.0**-20
TOP = 5
START_TIMEOUT_S = 400.0
ANSWER_TIMEOUT_S = 600.0
# A prompt of the identity run: a source file, and the number of its first tokens.
_TASK = re.compile(r"(?P<file>\S+\.py)\[:(?P<length>\d+)\]")

# Log-probabilities of the best tokens, by position and token.
Tops = Sequence[dict[int, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, nargs="+", help="reports of identity runs")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cases = differing([json.loads(path.read_text(encoding="utf-8")) for path in args.parts])
    with tempfile.TemporaryDirectory() as logs:
        found = [measure(*case, Path(logs)) for case in sorted(cases)]
    figures = [
        Figure("identity.ties", sum(each["is_tie"] for each in found), "places"),
        Figure("identity.ties.gap", max((e["gap"] for e in found), default=0.0), "log-probability"),
    ]
    write_json(args.out, "identity_ties", torch.device("cpu"), {"raw": found}, figures)
    for each in found:
        print(json.dumps(each))
    return 0 if all(each["is_tie"] for each in found) else 1


def differing(parts: Iterable[dict[str, Any]]) -> set[tuple[str, str, str, int, int, int]]:
    """Return (model, setting, task, position, expected token, actual token) of all differing
    answers."""
    return {
        (*entry["in"].split(".")[:2], entry["task"], entry["position"], *_first(entry))
        for part in parts
        for entry in part["mismatches"]
    }


def _first(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["expected"][0], entry["actual"][0]


def measure(
    model: str, setting: str, task: str, position: int, expected: int, actual: int, logs: Path
) -> dict[str, Any]:
    """Continue one prompt on both servers, and compare. Raises ValueError for a task whose prompt
    is not the start of one file."""
    ids = prompt_of(MODELS[model], task)
    spec = Setting(*setting.split("-")).server(MODELS[model])
    off = () if setting.startswith("exact") else (*spec.arguments, "--kvspec-draft-len=0")
    reference = top_log_probs(MODELS[model], off, ids, position, logs / "reference.log")
    drafted = top_log_probs(MODELS[model], spec.arguments, ids, position, logs / "drafted.log")
    tokens = (expected, actual)
    gaps = [gap_of(tops[position], *tokens) for tops in (reference, drafted)]
    noise = noise_of(reference[:position], drafted[:position])
    return {
        "model": model,
        "setting": setting,
        "task": task,
        "position": position,
        "tokens": tokens,
        "gap": max(gaps),
        "noise": noise,
        "is_tie": is_tie(max(gaps), noise),
    }


def is_tie(gap: float, noise: float) -> bool:
    """Return True for two tokens that are no further apart than their noise. Each log-probability
    has its own, so twice."""
    return gap <= min(2 * noise, LIMIT)


def gap_of(top: dict[int, float], one: int, other: int) -> float:
    """Return how far the log-probabilities of two tokens are apart. Raises ValueError for a token
    that is not among the best of its position: such answers do not part at a tie."""
    for token in (one, other):
        if token not in top:
            raise ValueError(f"token {token} is not among the {TOP} best of a server: no tie")
    return abs(top[one] - top[other])


def noise_of(one: Tops, other: Tops) -> float:
    """Return the largest difference of a log-probability that both servers report."""
    return max(
        (
            abs(a[token] - b[token])
            for a, b in zip(one, other, strict=True)
            for token in a.keys() & b.keys()
        ),
        default=0.0,
    )


def prompt_of(model: Path, task: str) -> list[int]:
    """Return the token ids of a prompt of the identity run, by its name."""
    match = _TASK.fullmatch(task)
    if match is None:
        raise ValueError(f"{task} does not name the start of one file")
    text = source_path(match["file"]).read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return ids[: int(match["length"])]


def top_log_probs(
    model: Path, arguments: Sequence[str], ids: Sequence[int], position: int, log_path: Path
) -> Tops:
    """Return the log-probabilities of the best tokens of greedy positions 0 to `position`."""
    command = (*CPU_ARGUMENTS, f"--model-path={model}", *arguments)
    body = {
        "input_ids": list(ids),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": position + 8,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "top_logprobs_num": TOP,
    }
    with ServerProcess(command, log_path=log_path) as server:
        server.wait_healthy(START_TIMEOUT_S)
        reply = requests.post(f"{server.base_url}/generate", json=body, timeout=ANSWER_TIMEOUT_S)
        reply.raise_for_status()
    tops = reply.json()["meta_info"]["output_top_logprobs"][: position + 1]
    return [{token: value for value, token, *_ in top} for top in tops]


if __name__ == "__main__":
    sys.exit(main())
