"""Expected Attention: the attention of queries that are still to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_kvspec.scorers.attention import BLOCK_ELEMENTS
from sglang_kvspec.scorers.base import ALWAYS, About, Allocation, LayerChunk, Needs, Rotary
from sglang_kvspec.scorers.options import require


@dataclass(frozen=True, slots=True)
class ExpectedAttention:
    """Scorer by the attention that tokens may expect from future queries, times the norm of their
    values.

    Source: Devoto, Jeblick, Jégou, "Expected Attention: KV Cache Compression by Estimating
    Attention from Future Queries Distribution", arXiv 2510.00636: future queries are normally
    distributed, with the mean and covariance of the prompt's queries before the rotary embedding.
    These are rotated by the average of the rotations that come next. Then

        E[exp(scale * q·k)] = exp(scale * mean·k + scale^2 / 2 * k·covariance·k).

    sinks: first tokens, which drafts always read and whose queries do not count. future: positions
    that follow the prompt. Queries of a cached prefix are unknown; its keys are scored all the
    same.
    """

    about: ClassVar[About] = About(
        "Expected Attention (Devoto et al., arXiv 2510.00636)",
        "tokens that queries like those of the prompt would attend to",
        "means and covariances of queries; a product with a head_dim^2 matrix for each query head",
    )
    needs: ClassVar[Needs] = Needs(earlier=False, rotary=True)
    allocation: ClassVar[Allocation] = "head"

    future: int = 512
    sinks: int = 4

    def __post_init__(self) -> None:
        require(self.future >= 1, "expected", "future", self.future, "1 or more")
        require(self.sinks >= 0, "expected", "sinks", self.sinks, "0 or more")

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        assert chunk.rotary is not None
        unrotated = chunk.rotary.unrotate(chunk.queries.float(), chunk.positions)
        _add_queries(chunk.memory, unrotated[max(0, self.sinks - chunk.start) :])
        size = (chunk.keys.shape[1], chunk.end)
        scores = chunk.keys.new_full(size, ALWAYS, dtype=torch.float32)
        if chunk.end <= self.sinks:
            return scores
        rotation = _average_rotation(chunk.rotary, unrotated, chunk.end, self.future)
        mean = chunk.memory["mean"] @ rotation
        covariance = rotation.T @ (chunk.memory["scatter"] / chunk.memory["count"]) @ rotation
        keys = chunk.keys[self.sinks :].float().transpose(0, 1)
        logits = _expected_logits(keys, mean * chunk.scale, covariance * chunk.scale**2)
        attention = logits.softmax(-1).mean(1)
        scores[:, self.sinks :] = attention * chunk.values[self.sinks :].float().norm(dim=-1).T
        return scores


def _add_queries(memory: dict[str, torch.Tensor], queries: torch.Tensor) -> None:
    """Add queries [n, num_heads, head_dim] to the statistics in memory: count, mean [num_heads,
    head_dim] and scatter [num_heads, head_dim, head_dim], the sum of products of differences from
    the mean."""
    # Statistics of parts are merged, because a difference of large sums would lose digits.
    # (Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    # Variances", 1979)
    if not len(queries):
        return
    # Counts stay on the device: reading one would wait for it.
    added = queries.new_full((), len(queries))
    mean = queries.mean(0)
    centred = queries - mean
    scatter = torch.einsum("nhi,nhj->hij", centred, centred)
    count = added
    if memory:
        count = memory["count"] + added
        shift = mean - memory["mean"]
        weight = memory["count"] * added / count
        scatter = memory["scatter"] + scatter + weight * shift[:, :, None] * shift[:, None, :]
        mean = memory["mean"] + shift * (added / count)
    memory.update(count=count, mean=mean, scatter=scatter)


def _average_rotation(rotary: Rotary, like: torch.Tensor, first: int, num: int) -> torch.Tensor:
    """Return the mean of the rotations at positions first .. first + num - 1, [head_dim, head_dim]:
    a row vector times this matrix is rotated. like: [..., head_dim], its device and dtype."""
    basis = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    positions = torch.arange(first, first + num, device=like.device)
    return rotary.rotate(basis.expand(num, -1, -1), positions).mean(0)


def _expected_logits(
    keys: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor
) -> torch.Tensor:
    """Return mean·k + k·covariance·k / 2, [num_kv_heads, query heads of one KV head, num_keys].

    keys: [num_kv_heads, num_keys, head_dim]; mean: [num_heads, head_dim]; covariance: [num_heads,
    head_dim, head_dim]; all float32.
    """
    num_kv_heads, num_keys, head_dim = keys.shape
    mean = mean.view(num_kv_heads, -1, head_dim)
    covariance = covariance.view(num_kv_heads, -1, head_dim, head_dim)
    logits = mean @ keys.transpose(1, 2)
    size = max(1, BLOCK_ELEMENTS // (mean.shape[0] * mean.shape[1] * head_dim))
    for begin in range(0, num_keys, size):
        block = keys[:, None, begin : begin + size]
        logits[:, :, begin : begin + size] += (block @ covariance * block).sum(-1) / 2
    return logits
