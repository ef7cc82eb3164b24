"""KV of a request that a decode server retracts and cannot compute again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.page_records import copy_in, copy_out
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.runtime.disaggregation.arrivals import Arrivals
from sglang_kvspec.runtime.disaggregation.departures import NOT_NEEDED


class RetractedKV:
    """Copy of a request's pages: encoded, in the recent window, or with residuals that are still on
    the network and keep arriving. If the copy is deleted before restore(), its transfer is
    cancelled."""

    def __init__(
        self, kv: PagedKVCache, arrivals: Arrivals, pages: Sequence[int], num_tokens: int
    ) -> None:
        """pages: pages of the request's first num_tokens tokens, in order."""
        self._kv, self._arrivals, self._num_tokens = kv, arrivals, num_tokens
        in_flight = set(kv.residuals.table.pages_in(pages, ResidualState.IN_FLIGHT))
        places = dict(enumerate(pages))
        self._missing_at = [at for at, page in places.items() if page in in_flight]
        # On a GPU, committed pages of the window are encoded too, and are copied as records.
        self._recent = {
            at: self._recent_page(page, at)
            for at, page in places.items()
            if page in kv.window.slots and not kv.is_encoded(page)
        }
        elsewhere = {*self._missing_at, *self._recent}
        self._whole_at = [at for at in places if at not in elsewhere]
        self._whole = copy_out(kv, [pages[at] for at in self._whole_at])
        self._missing = kv.records.read_anchors([pages[at] for at in self._missing_at])
        self._room = (
            arrivals.keep_retracted(pages[self._missing_at[0]]) if self._missing_at else None
        )
        self._abandoned = weakref.finalize(self, _abandon, arrivals, self._room)

    def _recent_page(self, page: int, at: int) -> torch.Tensor:
        size = self._kv.geometry.page_size
        tokens = self._kv.records.read_plain(page, min(size, self._num_tokens - at * size))
        assert tokens is not None, "the page must be in the recent window"
        return tokens

    def restore(self, pages: Sequence[int]) -> None:
        """Copy the KV into free pages. The tokens of a partial last page go into the recent window
        later, when the request is admitted."""
        self._abandoned.detach()
        kv = self._kv
        copy_in(kv, [pages[at] for at in self._whole_at], self._whole)
        missing = [pages[at] for at in self._missing_at]
        kv.begin_landing(missing)
        kv.records.write_anchors(missing, self._missing)
        kv.finish_anchors(missing)
        for at, tokens in self._recent.items():
            if tokens.shape[2] < kv.geometry.page_size:
                self._arrivals.keep_tail(pages[at], tokens)
            else:
                k, v = tokens.unsqueeze(0).unbind(2)
                kv.write_whole([pages[at]], k, v)
        if self._room is not None:
            self._arrivals.restore(self._room, pages)


def _abandon(arrivals: Arrivals, room: int | None) -> None:
    if room is not None:
        arrivals.drop(room, NOT_NEEDED)
