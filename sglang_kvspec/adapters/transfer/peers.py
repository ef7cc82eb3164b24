"""Facts about the server of this process, which both sides of a transfer use and exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_kvspec.adapters.compat.transfer import KVTransferError
from sglang_kvspec.adapters.model_identity import (
    hash_of_all_ranks,
    hash_of_weights,
    portable_fingerprint,
    versions_of_kv,
)
from sglang_kvspec.adapters.pool import KVSpecPool
from sglang_kvspec.codecs.wire import make_wire_codec
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.residual_forms import residual_form
from sglang_kvspec.runtime.disaggregation.handover import HandoverFormat
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire, SplitWire, WholeWire
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.transport import PROTOCOL, CurveKeys, Identity
from sglang_kvspec.transport.keys import load_keys


@dataclass(slots=True)
class Serving:
    """The server of this process, or one of its ranks. manager: SGLang's KV manager of this side,
    None until it is made. news: set whenever something has happened on a link. join_rounds: makes
    writes to the recent window wait for rounds that run beside the main stream."""

    config: KVSpecConfig
    pool: KVSpecPool
    model_config: Any
    model: torch.nn.Module
    ranks: Ranks = field(default_factory=Ranks)
    manager: Any = None
    news: threading.Event = field(default_factory=threading.Event)
    join_rounds: Callable[[], None] = lambda: None

    @property
    def kv(self) -> PagedKVCache:
        return self.pool.kv

    def identity(self) -> Identity:
        """Return the identity of this rank. `fingerprint` covers its part of the model, which the
        same rank of a server with as many ranks has; `whole` covers all parts. Reads all weights
        twice. All ranks must call this at once."""
        geometry, settings = self.kv.geometry, self.kv.codec.settings
        config, whole = self.model_config, hash_of_all_ranks(self.model, self.ranks)
        return Identity(
            protocol=PROTOCOL,
            package=versions_of_kv(),
            codec=f"{settings.fingerprint}, {self._transfer}",
            target=self.config.target,
            page_size=geometry.page_size,
            fingerprint=portable_fingerprint(config, hash_of_weights(self.model)),
            whole=portable_fingerprint(config, whole),
            tp_shape=(self.ranks.size, geometry.num_kv_heads),
            rank=self.ranks.rank,
        )

    @property
    def _transfer(self) -> str:
        """Return the form of the bytes that cross, which both ends must share besides the codec."""
        told = f"--kvspec-transfer {self.config.transfer}"
        if self.config.transfer != "split":
            return told
        form = residual_form(self.kv.codec, self.kv.geometry)
        return f"{told}, {form.name} residuals (--kvspec-exact-residual)"

    def wire(self) -> PageWire:
        if self.config.transfer == "split":
            return SplitWire(self.kv)
        codec = make_wire_codec(self.config.transfer, self.kv.geometry)
        return WholeWire(self.kv, codec, drafts=self.config.drafts)

    def handovers(self, kv_args: Any) -> HandoverFormat:
        page = self.kv.plan.page_bytes
        field_bytes = tuple(kv_args.aux_item_lens)
        return HandoverFormat(self.kv.geometry, field_bytes, page.anchor + page.residual)

    def keys(self) -> CurveKeys | None:
        """Return the keys for transfers; None without --kvspec-transfer-keys. Raises ConfigError
        for a folder without keys."""
        folder = self.config.transfer_keys
        return None if folder is None else load_keys("--kvspec-transfer-keys", folder)

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait until something has happened on a link since the last call, timeout_s at most."""
        self.news.wait(timeout_s)
        self.news.clear()


# Reason of all refusals after an update of weights, with the role of the server.
WEIGHTS_CHANGED = (
    "the weights of the {0} server were updated after the handshake: restart the {0} server to "
    "transfer KV again"
)
_MAX_ROOM = (1 << 63) - 1
_ON_ANOTHER_RANK = "another rank of this server cancelled the request: see the log of that rank"


def wrong_room(room: Any) -> str | None:
    """Return why a request cannot be transferred in this room, which a client chose; None if it
    can. SGLang waits for ever in room 0."""
    if type(room) is int and 0 < room <= _MAX_ROOM:
        return None
    return f"bootstrap_room must be in [1, 2^63), got {room!r:.40}"


def failed(room: int, reason: str | None) -> KVTransferError:
    """Return the error of a request that SGLang ends on all ranks. reason: None if this rank knows
    of none."""
    if reason is None:
        return KVTransferError(room, _ON_ANOTHER_RANK, is_from_another_rank=True)
    return KVTransferError(room, reason)


_serving: list[Serving] = []


def install(serving: Serving) -> None:
    """Say which server this process is, before SGLang makes its transfer manager."""
    _serving[:] = [serving]


def serving() -> Serving:
    assert _serving, "SGLang must make the pools before a transfer manager"
    return _serving[0]


def read_fields(kv_args: Any, index: int) -> tuple[bytes, ...]:
    """Read SGLang's metadata of a request, of which SGLang gives addresses only."""
    import ctypes

    return tuple(
        ctypes.string_at(address + index * size, size)
        for address, size in zip(kv_args.aux_data_ptrs, kv_args.aux_item_lens, strict=True)
    )


def write_fields(kv_args: Any, index: int, fields: tuple[bytes, ...]) -> None:
    """Write metadata that another server read to where this server's SGLang looks for it."""
    import ctypes

    for address, size, value in zip(
        kv_args.aux_data_ptrs, kv_args.aux_item_lens, fields, strict=True
    ):
        assert len(value) == size, "fields of a handover must be checked when the handover is read"
        ctypes.memmove(address + index * size, value, size)
