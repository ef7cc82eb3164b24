"""Scores of prompts: by page for cached prefixes, and whole between two chunks of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.scorers.base import ALWAYS

# Prefills after which a prompt is forgotten if none of them has continued it: its request has ended
# between two chunks. SGLang continues a prompt in the next prefill.
MOST_PREFILLS = 16
Memory = list[dict[str, torch.Tensor]]


@dataclass(slots=True)
class ScoredPrompt:
    """Scores of a prompt so far. scores: [num_layers, num_kv_heads, num_tokens] float32 on the CPU.
    pages: of these tokens. first_own: position of the first token that the request has computed
    itself, in a page that it still has. memory: the scorer's, by layer. made_by: number of the
    prefill."""

    scores: torch.Tensor
    pages: torch.Tensor
    first_own: int
    memory: Memory
    made_by: int = 0


class PromptScores:
    """Scores of the prompts of one rank, on the CPU.

    A cached prefix keeps the scores of the request that computed it, by page, for a scorer that
    reads them. A prompt that comes in several chunks is known by the page of its last token so far.
    A freed page takes both along.
    """

    def __init__(self, geometry: KVGeometry, *, by_page: bool = True) -> None:
        """by_page: keep scores of cached prefixes, too, for a scorer that reads them."""
        self._geometry, self._keeps_pages = geometry, by_page
        # [num_layers, num_kv_heads, page_size] by page; ALWAYS for tokens without a score.
        self._by_page: dict[int, torch.Tensor] = {}
        # Prompts between two chunks, by the page of their last token.
        self._prompts: dict[int, ScoredPrompt] = {}
        self._num_prefills = 0

    def __len__(self) -> int:
        """Return the number of prompts between two chunks."""
        return len(self._prompts)

    def begin_prefill(self) -> None:
        """Count a prefill. Forget prompts that none has continued for long: their pages may stay
        cached, and memory of all layers, on a GPU its own, with them."""
        self._num_prefills += 1
        oldest = self._num_prefills - MOST_PREFILLS
        ended = [page for page, known in self._prompts.items() if known.made_by < oldest]
        for page in ended:
            del self._prompts[page]

    def take(self, pages: torch.Tensor, num_tokens: int) -> ScoredPrompt:
        """Return, and forget, what is known of a prompt of which num_tokens tokens have KV. pages:
        its page ids on the CPU."""
        if num_tokens:
            last_page = int(pages[(num_tokens - 1) // self._geometry.page_size])
            known = self._prompts.pop(last_page, None)
            # A page that is full now may have been the last one of a shorter prompt.
            if known is not None and known.scores.shape[-1] == num_tokens:
                # SGLang replaces pages by those of a request that computed the same tokens first.
                others = (known.pages != pages[: len(known.pages)]).nonzero()
                if len(others):
                    behind = (int(others[-1]) + 1) * self._geometry.page_size
                    known.first_own = max(known.first_own, behind)
                return known
        memory: Memory = [{} for _ in range(self._geometry.num_layers)]
        own = pages[: -(-num_tokens // self._geometry.page_size)]
        return ScoredPrompt(self._scores_of(own, num_tokens), own, num_tokens, memory)

    def _scores_of(self, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the scores [num_layers, num_kv_heads, num_tokens] of the tokens of pages."""
        geometry = self._geometry
        shape = (geometry.num_layers, geometry.num_kv_heads, geometry.page_size)
        if not self._keeps_pages:
            return torch.full((1, 1, 1), ALWAYS).expand(*shape[:2], num_tokens)
        unknown = torch.full(shape, ALWAYS)
        by_page = [self._by_page.get(page, unknown) for page in pages.tolist()]
        if not by_page:
            return unknown[..., :0]
        return torch.cat(by_page, dim=-1)[..., :num_tokens]

    def keep(self, before: ScoredPrompt, pages: torch.Tensor, scores: torch.Tensor) -> None:
        """Keep the scores of a prompt behind a forward, by page but for pages that another request
        has computed, and whole. before: what take() gave. pages, scores: as in ScoredPrompt; there
        may be more pages."""
        size = self._geometry.page_size
        num_pages = -(-scores.shape[-1] // size)
        self._prompts[int(pages[num_pages - 1])] = ScoredPrompt(
            scores, pages[:num_pages], before.first_own, before.memory, self._num_prefills
        )
        if not self._keeps_pages:
            return
        first = before.first_own // size
        # A cached prefix may be a hundred times as long as what is behind it.
        behind = scores[..., first * size :]
        padded = F.pad(behind, (0, num_pages * size - scores.shape[-1]), value=ALWAYS)
        own = torch.split(padded, size, dim=-1)
        # Without own tokens there are no pages, but one empty part.
        for page, of_page in zip(pages[first:num_pages].tolist(), own, strict=False):
            self._by_page[page] = of_page.clone()

    def on_pages_freed(self, pages: Iterable[int]) -> None:
        """Forget what is known of pages that SGLang freed."""
        for page in pages:
            self._by_page.pop(page, None)
            self._prompts.pop(page, None)
