"""Requests whose queries, keys and values are known in advance, and dense attention over them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind, prefill_row
from sglang_kvspec.kv.reference_cache import KV, ReferenceKVCache
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.reference_attention import ReferenceAttention


class Story:
    """Queries, keys and values of a request: q [layers, num_tokens, heads, head_dim], k and v [..,
    num_kv_heads, ..], and its page ids."""

    def __init__(
        self,
        kv: ReferenceKVCache,
        pages: Sequence[int],
        num_tokens: int,
        group: int = 1,
        seed: int = 0,
    ) -> None:
        g = kv.geometry
        rng = torch.Generator().manual_seed(seed)
        shape = (g.num_layers, num_tokens, g.num_kv_heads * group, g.head_dim)
        self.q = torch.randn(shape, generator=rng).to(g.dtype)
        shape = (2, g.num_layers, num_tokens, g.num_kv_heads, g.head_dim)
        self.k, self.v = (torch.randn(shape, generator=rng) * 2 + 0.5).to(g.dtype)
        self.pages = torch.tensor(pages)
        self.page_size = g.page_size

    def pages_to(self, end: int) -> torch.Tensor:
        return self.pages[: -(-end // self.page_size)]

    def row(self, kind: RowKind, start: int, length: int) -> Row:
        return Row(kind, start, length, self.pages_to(start + length))

    def prefill(self, start: int, end: int, recent_pages: int) -> Row:
        pages = self.pages_to(end)
        size = self.page_size
        return prefill_row(start, end - start, pages, page_size=size, recent_pages=recent_pages)

    def with_codec(self, kv: ReferenceKVCache, layer: int, *, anchor_only: bool) -> KV:
        """Return k, v of a layer as encoded pages read. Tokens of the last, partial page are
        raw."""
        full = len(self.k[layer]) // self.page_size * self.page_size
        raw = self.k[layer], self.v[layer]
        if not full:
            return raw
        record = kv.codec.encode(*(x[:full].unflatten(0, (-1, self.page_size)) for x in raw))
        codec = kv.codec
        coded = codec.decode_anchor(record.anchor) if anchor_only else codec.decode_target(*record)
        mixed = [torch.cat((c.flatten(0, 1), r[full:])) for c, r in zip(coded, raw, strict=True)]
        return mixed[0], mixed[1]


class Driver:
    """Run rows of stories through ReferenceAttention, layer by layer."""

    def __init__(self, kv: ReferenceKVCache, recent_pages: int = 1) -> None:
        self.kv = kv
        self.attention = ReferenceAttention(kv)
        self.keeper = PageKeeper(kv, recent_pages)
        self.recent_pages = recent_pages
        self.scale = kv.geometry.head_dim**-0.5

    def forward(self, *rows: tuple[Story, Row]) -> list[torch.Tensor]:
        """Return the output of each row [layers, length, heads, head_dim]."""
        by_layer = []
        with self.attention.planned(ForwardPlan(tuple(row for _, row in rows))):
            for layer in range(self.kv.geometry.num_layers):
                q, k, v = (
                    torch.cat([getattr(story, name)[layer, r.start : r.end] for story, r in rows])
                    for name in "qkv"
                )
                by_layer.append(self.attention.forward(layer, q, k, v, self.scale))
        outputs = torch.stack(by_layer).split([row.length for _, row in rows], dim=1)
        return list(outputs)

    def prefill(self, story: Story, cuts: Sequence[int]) -> torch.Tensor:
        """Compute the chunks between cuts, one forward each, and commit them. Return all
        outputs."""
        out = []
        for start, end in pairwise(cuts):
            out += self.forward((story, story.prefill(start, end, self.recent_pages)))
            self.keeper.commit(story.pages_to(end), start, end)
            self.keeper.flush()
            self.kv.check_integrity()
        return torch.cat(out, dim=1)

    def verify(self, story: Story, start: int, length: int) -> torch.Tensor:
        """Compute one VERIFY row, and accept all of it."""
        (out,) = self.forward((story, story.row(RowKind.VERIFY, start, length)))
        self.keeper.commit(story.pages_to(start + length), start, start + length)
        self.keeper.flush()
        self.kv.check_integrity()
        return out


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
    """Return softmax attention, in fp64, of queries [n, heads, head_dim] at positions first.. over
    k, v [>= first + n, num_kv_heads, head_dim]."""
    group = q.shape[1] // k.shape[1]
    num_seen = first + len(q)
    k, v = (x[:num_seen].double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    future = torch.arange(num_seen) > torch.arange(first, num_seen)[:, None]
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def target_attention(kv: ReferenceKVCache, story: Story, layer: int) -> torch.Tensor:
    """Return the attention of every token of a story, by the definition of the target alone."""
    q, k, v = story.q[layer], story.k[layer], story.v[layer]
    if kv.codec.target == "exact":
        return dense(q, k, v, 0)
    coded_k, coded_v = story.with_codec(kv, layer, anchor_only=False)
    out = []
    for begin in range(0, len(q), story.page_size):
        own = slice(begin, begin + story.page_size)
        seen_k = torch.cat((coded_k[:begin], k[own]))
        seen_v = torch.cat((coded_v[:begin], v[own]))
        out.append(dense(q[own], seen_k, seen_v, begin))
    return torch.cat(out)


@pytest.fixture(scope="session")
def attention_lab() -> SimpleNamespace:
    """The classes and functions of this module, for tests to use by name."""
    return SimpleNamespace(
        Story=Story, Driver=Driver, dense=dense, target_attention=target_attention
    )


@pytest.fixture(scope="session")
def assert_attention() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function that compares fp32 outputs with fp64 attention, within the rounding of sums
    over a few hundred tokens."""

    def check(actual: torch.Tensor, exact: torch.Tensor) -> None:
        torch.testing.assert_close(actual, exact, atol=1e-5, rtol=0)

    return check


@pytest.fixture(scope="session")
def run_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Path, int], list[dict[str, Any]]]:
    """Return a function that runs a script of `python SCRIPT RANK SIZE RENDEZVOUS` as several
    ranks, and returns the JSON that each prints."""

    def run(script: Path, size: int) -> list[dict[str, Any]]:
        rendezvous = tmp_path_factory.mktemp("ranks") / "rendezvous"
        # The ranks get the import path of this process, which pytest has set.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        processes = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(size), rendezvous],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            outputs = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert [process.returncode for process in processes] == [0] * size
        return [json.loads(output) for output in outputs]

    return run
