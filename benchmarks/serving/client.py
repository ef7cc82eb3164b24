"""Runs of sglang.bench_serving in this process: importing it again for every pass takes 14 s."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from serving.records import Pass

# bench_serving refuses fewer output tokens for a data set that it does not know.
LEAST_TEXT_OUTPUT = 4


class BenchError(RuntimeError):
    """Failure of bench_serving, or of some of its requests."""


class OutOfTime(KeyboardInterrupt):
    """End of the time for all points. As a KeyboardInterrupt, it is not taken for the failure of
    one request by asyncio or bench_serving."""


def load_bench_serving() -> ModuleType:
    """Import sglang.bench_serving, which takes seconds.

    bench_serving imports `datasets` for data that is not used here. If `datasets` is not installed,
    a stand-in replaces it during the import.
    """
    # transformers looks for `datasets` when first imported, and must not find the stand-in.
    import transformers  # noqa: F401

    missing = importlib.util.find_spec("datasets") is None
    if missing:
        stand_in = ModuleType("datasets")
        stand_in.__dict__["load_dataset"] = None
        sys.modules["datasets"] = stand_in
    try:
        from sglang.benchmark import serving
    finally:
        if missing:
            del sys.modules["datasets"]
    return serving


def arguments(
    url: str,
    folder: Path,
    *,
    prompt_len: int,
    output_len: int,
    num_prompts: int,
    concurrency: int,
    seed: int,
    texts: Path | None = None,
) -> list[str]:
    """Return bench_serving's command line. texts: file of write_texts(), None for random tokens."""
    if texts is None:
        data = [
            "--dataset-name=random-ids",
            "--tokenize-prompt",
            f"--random-input-len={prompt_len}",
            f"--random-output-len={output_len}",
            "--random-range-ratio=1",
        ]
    else:
        data = [
            "--dataset-name=custom",
            f"--dataset-path={texts}",
            f"--sharegpt-output-len={max(output_len, LEAST_TEXT_OUTPUT)}",
        ]
    return [
        "--backend=sglang",
        f"--base-url={url}",
        f"--model={folder}",
        f"--tokenizer={folder}",
        *data,
        f"--num-prompts={num_prompts}",
        f"--max-concurrency={concurrency}",
        f"--seed={seed}",
        "--warmup-requests=0",
        "--ready-check-timeout-sec=0",
        "--cache-report",
        "--disable-tqdm",
        "--output-details",
    ]


def run(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run one pass. Return bench_serving's result, with `itls` and `ttfts` by request.

    Raises BenchError if a request failed, OutOfTime after `timeout_s`.
    """
    if timeout_s <= 0:
        raise OutOfTime
    serving = load_bench_serving()
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "result.jsonl"
        argv = ["bench_serving", *command, f"--output-file={output}"]
        try:
            with _argv(argv), _time_limit(timeout_s), contextlib.redirect_stdout(said):
                serving.cli_main()
        except (Exception, SystemExit) as error:
            raise BenchError(f"sglang.bench_serving failed: {error}\n{said.getvalue()}") from error
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    failures = [text for text in result["errors"] if text]
    if failures or result["completed"] != len(result["errors"]):
        first = failures[0].strip().splitlines()[-1] if failures else "no reason given"
        raise BenchError(
            f"{len(result['errors']) - result['completed']} of {len(result['errors'])} requests "
            f"failed: {first}"
        )
    return result


def summary(result: dict[str, Any]) -> Pass:
    return Pass(
        output_tokens_per_s=result["output_throughput"],
        total_tokens_per_s=result["total_throughput"],
        ttft_mean_ms=result["mean_ttft_ms"],
        ttft_p99_ms=result["p99_ttft_ms"],
        itl_p50_ms=result["median_itl_ms"],
        itl_p99_ms=result["p99_itl_ms"],
        tpot_mean_ms=result["mean_tpot_ms"],
        duration_s=result["duration"],
    )


def most_uncached(result: dict[str, Any]) -> int:
    """Return the most prompt tokens that a request had to compute."""
    pairs = zip(result["input_lens"], result["cached_tokens"], strict=True)
    return max(prompt - cached for prompt, cached in pairs)


@contextlib.contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
    kept, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = kept


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise OutOfTime

    kept = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)
