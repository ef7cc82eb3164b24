"""Target run and draft runs of a batch of prompts, and their agreement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from acceptance.model import LayerCache, Llama, Prefilled, attend
from sglang_kvspec.codecs import Codec
from sglang_kvspec.scorers.base import Rotary

# Maps exact (k, v) pages [N, page_size, heads, head_dim] to decoded ones.
PageMap = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class TargetRun:
    """Greedy decoding of a batch over the exact cache.

    tokens [batch, steps + 1] int64: the token that prefill gave, then one per step.
    cache: K and V of prompt and decoded tokens, prompt_len + steps long, exact.
    queries: queries of the decoded tokens, per layer [batch, num_heads, steps, head_dim].
    prompt_queries: of the last tokens of the prompt, per layer [batch, num_heads, n, head_dim].
    """

    prompt_len: int
    tokens: torch.Tensor
    cache: LayerCache
    queries: list[torch.Tensor]
    prompt_queries: list[torch.Tensor]

    @property
    def steps(self) -> int:
        return self.tokens.shape[1] - 1


def through_anchor(codec: Codec) -> PageMap:
    """Return a map from exact pages to pages as a draft reads them."""
    return lambda k, v: codec.decode_anchor(codec.encode(k, v).anchor)


def through_target(codec: Codec) -> PageMap:
    """Return a map from exact pages to pages as a verification reads them."""
    return lambda k, v: codec.decode_target(*codec.encode(k, v))


def before_rotary(page_map: PageMap, rotary: Rotary, num_pages: int) -> PageMap:
    """Return a map of pages as they are, which maps K as it is in front of the rotary embedding.
    num_pages: of each request, from its first token on, request by request."""

    def mapped(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = num_pages * k.shape[1]
        positions = torch.arange(len(k) * k.shape[1], device=k.device) % tokens
        flat = rotary.unrotate(k.flatten(0, 1), positions).view_as(k)
        flat, v = page_map(flat, v)
        return rotary.rotate(flat.flatten(0, 1), positions).view_as(k), v

    return mapped


def in_parts(page_map: PageMap, pages: int) -> PageMap:
    """Return a map that maps at most `pages` pages at once, for codecs with large temporaries."""

    def mapped(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [page_map(*part) for part in zip(k.split(pages), v.split(pages), strict=True)]
        return torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])

    return mapped


def target_run(model: Llama, prompts: torch.Tensor, steps: int, prefill_batch: int) -> TargetRun:
    """Prefill prompts [batch, T] and decode `steps` greedy tokens of each, all exact."""
    parts = [model.prefill(p, steps) for p in prompts.to(model.device).split(prefill_batch)]
    return decoded_run(model, parts, prompts.shape[1], steps)


def decoded_run(model: Llama, parts: Sequence[Prefilled], prompt_len: int, steps: int) -> TargetRun:
    """Decode `steps` greedy tokens of prompts of prompt_len tokens, all exact. parts: what
    model.prefill() returned, with room for `steps` tokens."""
    cache: LayerCache = []
    for layer in range(model.shape.num_layers):
        pairs = [part[0][layer] for part in parts]
        cache.append((torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs])))
    first = torch.cat([logits for _, logits, _ in parts]).argmax(-1)
    prompt_queries = [torch.cat(layer) for layer in zip(*(part[2] for part in parts), strict=True)]
    tokens, queries = _greedy(model, first, prompt_len, cache, steps)
    by_layer = [torch.stack(step, dim=2) for step in zip(*queries, strict=True)]
    return TargetRun(prompt_len, tokens, cache, by_layer, prompt_queries)


def draft_cache(run: TargetRun, page_map: PageMap, page_size: int) -> LayerCache:
    """Return the cache that a draft would read. Full prompt pages go through `page_map`, except the
    newest full page: the recent window keeps it exact. Tokens after the prompt are those of the
    target run."""
    encoded = (run.prompt_len // page_size - 1) * page_size
    cache: LayerCache = []
    for k, v in run.cache:
        pages = [to_pages(part[:, :, :encoded], page_size) for part in (k, v)]
        batch = k.shape[0]
        decoded = [from_pages(part, batch) for part in page_map(*pages)]
        cache.append(
            tuple(  # type: ignore[arg-type]
                torch.cat((new, old[:, :, encoded:]), dim=2)
                for new, old in zip(decoded, (k, v), strict=True)
            )
        )
    return cache


def accepted_lengths(model: Llama, run: TargetRun, cache: LayerCache) -> torch.Tensor:
    """Return the accept length of a greedy draft over `cache`, [batch] in 0..steps.

    The accept length is the number of first tokens that agree with the target. Overwrites the part
    of `cache` after the prompt with K and V of the draft.
    """
    drafted, _ = _greedy(model, run.tokens[:, 0], run.prompt_len, cache, run.steps)
    agrees = (drafted == run.tokens)[:, 1:]
    return agrees.int().cumprod(dim=1).sum(dim=1)


def attention_vnmse(run: TargetRun, cache: LayerCache) -> torch.Tensor:
    """Return the attention error ||o - o'||² / ||o||² per prompt [batch], averaged over layers.

    o is the attention output of the target run's queries over the exact cache, o' over `cache`.
    `cache` must hold the target's tokens after the prompt.
    """
    length = run.prompt_len + run.steps
    newest = run.prompt_len + torch.arange(run.steps, device=run.tokens.device)
    mask = torch.arange(length, device=newest.device)[None] <= newest[:, None]
    total = torch.zeros(run.tokens.shape[0], device=newest.device)
    for exact, approximate, queries in zip(run.cache, cache, run.queries, strict=True):
        for rows in _slices(run.tokens.shape[0], 8):
            want = attend(queries[rows], exact[0][rows], exact[1][rows], mask)
            got = attend(queries[rows], approximate[0][rows], approximate[1][rows], mask)
            error = (got - want).square().sum((1, 2, 3))
            total[rows] += error / want.square().sum((1, 2, 3))
    return total / len(run.cache)


def _greedy(
    model: Llama, first: torch.Tensor, position: int, cache: LayerCache, steps: int
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    tokens, queries = [first], []
    for step in range(steps):
        logits, step_queries = model.decode(tokens[-1], position + step, cache)
        tokens.append(logits.argmax(-1))
        queries.append(step_queries)
    return torch.stack(tokens, dim=1), queries


def to_pages(part: torch.Tensor, page_size: int) -> torch.Tensor:
    """Reshape [batch, heads, T, D] to pages [batch * T / page_size, page_size, heads, D]."""
    by_token = part.transpose(1, 2).unflatten(1, (-1, page_size))
    return by_token.flatten(0, 1).contiguous()


def from_pages(pages: torch.Tensor, batch: int) -> torch.Tensor:
    return pages.unflatten(0, (batch, -1)).flatten(1, 2).transpose(1, 2)


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))
