"""The end of a request in SGLang's prefix cache, by the calls of each release of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_kvspec.adapters.compat.prefix_cache import RadixCache


class EndingRequests(RadixCache):  # type: ignore[misc]
    """Radix cache that learns whether the tree takes the KV of a request that ends.

    Until 0.5.20 SGLang calls cache_finished_req(). Since 0.5.21 it calls claim_kv_row(), then
    insert_req() if the tree takes the KV, and free_kv_row(), which is not given the request. Since
    0.5.22 checkpoint() takes the place of insert_req(), and is also called for running requests.
    """

    # A request whose row SGLang is about to free, until the tree has taken its KV.
    _leaving: Any = None

    def may_insert(self, req: Any) -> bool:
        """Return True if the tree may take the KV of a request."""
        raise NotImplementedError

    def note_inserted(self, req: Any, length: int) -> None:
        """Called after the tree has taken the first tokens of a request."""
        raise NotImplementedError

    def note_dropped(self, req: Any, length: int) -> None:
        """Called before the first tokens of a request are freed, which the tree does not take."""
        raise NotImplementedError

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        is_insert = is_insert and self.may_insert(req)
        if not is_insert:
            self.note_dropped(req, kv_len_to_handle)
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
        if is_insert and not self.disable_finished_insert:
            self.note_inserted(req, kv_len_to_handle)

    def claim_kv_row(self, req: Any) -> bool:
        self._leaving = req
        is_claimed: bool = super().claim_kv_row(req)
        return is_claimed

    def insert_req(self, req: Any, *, up_to: int) -> None:
        self._insert(super().insert_req, req, up_to)

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        if self._leaving is None:
            super().checkpoint(req, up_to=up_to)
        else:
            self._insert(super().checkpoint, req, up_to)

    def _insert(self, insert: Callable[..., None], req: Any, length: int) -> None:
        """Have the tree take the first tokens of a request that ends, if it may."""
        if not self.may_insert(req):
            return
        self._leaving = None
        insert(req, up_to=length)
        self.note_inserted(req, length)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        if self._leaving is not None:
            self.note_dropped(self._leaving, ranges[-1][1])
            self._leaving = None
        super().free_kv_row(kv, ranges)
