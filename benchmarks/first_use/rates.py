"""Tokens a second of a chat model on the CPU: --kvspec against plain SGLang."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import requests
from acceptance.prompts import english_pages
from tokenizers import Tokenizer

from first_use.turns import run_in_turn

PROMPT_LENGTHS = (200, 600, 1200, 2000, 3000, 4000)
NEW_TOKENS = 96
SERVERS = {
    "plain": (),
    "rounds": ("--kvspec",),
    "staggered": ("--kvspec", "--kvspec-schedule=staggered"),
}
# Each request computes its whole prompt in each run.
SERVER_ARGUMENTS = ("--disable-radix-cache", "--max-running-requests=6")
START_TIMEOUT_S = 400.0
ANSWER_TIMEOUT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Run:
    """Answers of one server to all prompts at once. seconds: from the first request to the end of
    the last answer. token_ids: new tokens by prompt."""

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> float:
        """Return new tokens a second, prefill included."""
        return sum(map(len, self.token_ids)) / self.seconds


def english_prompts(model: Path, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[list[int]]:
    """Return token ids of English text, a different part for each length. Raises AssertionError if
    there is too little text."""
    pages = [page for pages in english_pages().values() for page in pages]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    assert len(ids) >= sum(lengths), "there is too little text for these prompts"
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def measure(
    model: Path, folder: Path, pairs: int, announce: Callable[[str], None]
) -> dict[str, list[Run]]:
    """Run all servers in turn, `pairs` times, after one short run on each. Raises AssertionError if
    a server answers with other tokens than plain SGLang."""
    prompts = english_prompts(model)

    def check(name: str, number: int, found: Run, plain: Run) -> None:
        announce(f"{name} {number}: {found.rate:.2f} tokens/s, {found.seconds:.1f} s")
        assert found.token_ids == plain.token_ids, f"{name} answered with other tokens"

    return run_in_turn(
        SERVERS,
        (*SERVER_ARGUMENTS, f"--model-path={model}"),
        folder,
        pairs,
        warm_up=lambda url: run(url, prompts[:1], 8),
        run=lambda url: run(url, prompts, NEW_TOKENS),
        check=check,
        start_timeout_s=START_TIMEOUT_S,
    )


def run(url: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
    """Continue all prompts greedily, at once. Raises RequestException."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: _continue(url, ids, num_tokens), prompts))
    return Run(time.perf_counter() - began, tuple(answers))


def _continue(url: str, ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    parameters = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": list(ids), "sampling_params": parameters}
    reply = requests.post(f"{url}/generate", json=body, timeout=ANSWER_TIMEOUT_S)
    reply.raise_for_status()
    return tuple(reply.json()["output_ids"])
