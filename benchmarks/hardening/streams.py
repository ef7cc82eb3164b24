"""Gaps between the tokens of several streams at once on one server, as clients see them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import requests

TIMEOUT_S = 600.0
# English text, so that a real model continues sensibly. Each stream has a topic of its own.
TOPICS = ("rivers", "bread", "the moon", "a small library")
QUESTION = (
    "Write a long and detailed essay about {topic}. Explain where it comes from, what people have "
    "thought of it, how it has changed over the last thousand years, and what may become of it. "
)


@dataclass(frozen=True, slots=True)
class StreamRun:
    """Answers of one run. gaps_s: seconds between two chunks that bring tokens, of all streams.
    first_s: seconds until the first chunk, by stream. rate: tokens a second, from the first request
    to the end of the last answer. texts: answers by stream."""

    gaps_s: tuple[float, ...]
    first_s: tuple[float, ...]
    num_chunks: int
    rate: float
    texts: tuple[str, ...]

    def quantile(self, share: float) -> float:
        """Return the gap that this share of all gaps does not exceed, in seconds."""
        ordered = sorted(self.gaps_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def run_streams(url: str, num_tokens: int, topics: Sequence[str] = TOPICS) -> StreamRun:
    """Stream one greedy answer of `num_tokens` per topic, all at once. Raises RequestException."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(topics)) as pool:
        streams = list(pool.map(lambda topic: _read(url, topic, num_tokens), topics))
    elapsed_s = max(times[-1] for times, _ in streams) - began
    return StreamRun(
        gaps_s=tuple(
            later - earlier for times, _ in streams for earlier, later in itertools.pairwise(times)
        ),
        first_s=tuple(times[0] - began for times, _ in streams),
        num_chunks=sum(len(times) for times, _ in streams),
        rate=len(topics) * num_tokens / elapsed_s,
        texts=tuple(text for _, text in streams),
    )


def _read(url: str, topic: str, num_tokens: int) -> tuple[list[float], str]:
    """Return the arrival time of every chunk that brought tokens, and the whole text."""
    body = {
        "text": QUESTION.format(topic=topic) * 3,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
    }
    # Parse only after the stream has ended: parsing takes CPU time from the server.
    arrived: list[tuple[float, bytes]] = []
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=TIMEOUT_S) as reply:
        reply.raise_for_status()
        for part in reply.iter_content(None):
            arrived.append((time.perf_counter(), part))
    times: list[float] = []
    text, num_seen, rest = "", 0, b""
    for now, part in arrived:
        *events, rest = (rest + part).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: {"):
                continue
            chunk = json.loads(event.removeprefix(b"data: "))
            if len(chunk["output_ids"]) > num_seen:
                num_seen = len(chunk["output_ids"])
                if not times or times[-1] != now:
                    times.append(now)
            text = chunk["text"]
    assert num_seen == num_tokens, f"the stream ended after {num_seen} of {num_tokens} tokens"
    return times, text
