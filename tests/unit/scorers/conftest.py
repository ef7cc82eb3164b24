"""One attention layer with random tokens, shown to scorers chunk by chunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_kvspec.core.seams import SCORERS
from sglang_kvspec.scorers.base import ALWAYS, LayerChunk, Scorer

HEAD_DIM = 8
HIDDEN_SIZE = 12
# KV heads of the files of kvzap and duo.
FILE_HEADS = 3


class PairRotary:
    """Rotary embedding of neighbouring pairs of channels, by complex numbers."""

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._turned(x, positions)

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._turned(x, -positions)

    def _turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        speeds = 10.0 ** -torch.arange(pairs.shape[-1], dtype=torch.float64)
        angles = positions[:, None, None].double() * speeds
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)


@dataclass
class Layer:
    """Tokens of one layer, and how they are shown. queries [n, num_heads, HEAD_DIM]; keys, values
    [n, num_kv_heads, HEAD_DIM]; hidden [n, HIDDEN_SIZE]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor
    scale: float = 0.5
    rotary: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.keys)

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.keys.shape[1]

    def of_heads(self, first: int, stop: int) -> Layer:
        """Return what a rank with these KV heads has."""
        return Layer(
            self.queries[:, first * self.group : stop * self.group],
            self.keys[:, first:stop],
            self.values[:, first:stop],
            self.hidden,
            self.scale,
            self.rotary,
        )

    def run(
        self,
        scorer: Scorer,
        ends: list[int] | None = None,
        *,
        cached: int = 0,
        prompt_len: int | None = None,
        first_kv_head: int = 0,
        layer: int = 0,
    ) -> torch.Tensor:
        """Return the scores after chunks that end at `ends`; by default one chunk of all tokens.

        cached: tokens of a cached prefix. prompt_len: of the tokens, those of the prompt; all by
        default. Checks what Scorer promises of each chunk.
        """
        start = cached
        scores = torch.full((self.keys.shape[1], cached), ALWAYS)
        memory: dict[str, torch.Tensor] = {}
        for end in ends or [self.num_tokens]:
            known = end if prompt_len is None else min(end, prompt_len)
            chunk = LayerChunk(
                layer,
                first_kv_head,
                start,
                known,
                self.queries[start:end],
                self.scale,
                self.keys[:end],
                self.values[:end],
                scores if scorer.needs.earlier else torch.full((1, 1), ALWAYS).expand(scores.shape),
                memory,
                self.hidden[start:end] if scorer.needs.hidden else None,
                self.rotary if scorer.needs.rotary else None,
            )
            given = [part.clone() for part in _inputs(chunk)]
            scores = scorer.score(chunk)
            assert all(map(torch.equal, given, _inputs(chunk))), "an input was changed"
            assert scores.shape == (self.keys.shape[1], end)
            assert scores.dtype == torch.float32
            assert not scores.isnan().any()
            start = end
        return scores

    def attention(self, token: int, head: int) -> torch.Tensor:
        """Return the softmax attention of one query, float64 [token + 1]."""
        query = self.queries[token, head].double()
        keys = self.keys[: token + 1, head // self.group].double()
        exponentials = torch.exp(self.scale * keys @ query)
        return exponentials / exponentials.sum()


def _inputs(chunk: LayerChunk) -> list[torch.Tensor]:
    parts = [chunk.queries, chunk.keys, chunk.values, chunk.scores, chunk.hidden]
    return [part for part in parts if part is not None]


@pytest.fixture(scope="session")
def make_layer() -> Callable[..., Layer]:
    """Return a function that makes a Layer of random tokens."""

    def make(
        num_tokens: int,
        *,
        num_kv_heads: int = FILE_HEADS,
        group: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> Layer:
        random = torch.Generator().manual_seed(num_tokens)
        sizes = [(num_kv_heads * group, HEAD_DIM), *[(num_kv_heads, HEAD_DIM)] * 2, (HIDDEN_SIZE,)]
        parts = [torch.randn((num_tokens, *size), generator=random).to(dtype) for size in sizes]
        return Layer(*parts, rotary=PairRotary())

    return make


@pytest.fixture(scope="session")
def surrogate_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A surrogate for kvzap, of 2 layers."""
    random = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(2):
        weight = torch.randn((FILE_HEADS, HIDDEN_SIZE), generator=random)
        tensors[f"layers.{layer}.weight"] = weight
        tensors[f"layers.{layer}.bias"] = torch.randn(FILE_HEADS, generator=random)
    path = tmp_path_factory.mktemp("kvzap") / "surrogate.safetensors"
    save_file(tensors, path)
    return path


@pytest.fixture(scope="session")
def heads_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration for duo, of 2 layers. The largest numbers are those of KV head 1 of layer 0,
    and of KV heads 0 and 2 of layer 1."""
    path = tmp_path_factory.mktemp("duo") / "heads.json"
    path.write_text(json.dumps({"retrieval": [[0.1, 0.9, 0.2], [0.8, 0.3, 0.7]]}))
    return path


@pytest.fixture(scope="session")
def make_scorer(surrogate_file: Path, heads_file: Path) -> Callable[..., Scorer]:
    """Return a function that makes a scorer by its name, with a file where one is needed."""
    given = {
        "kvzap": {"file": str(surrogate_file), "window": 16},
        "duo": {"file": str(heads_file)},
    }

    def make(name: str, **options: Any) -> Scorer:
        scorer: Scorer = SCORERS.load(name)(**given.get(name, {}) | options)
        return scorer

    return make
