"""How full pages cross between two servers: split into anchors and residuals, or in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from sglang_kvspec.codecs.wire import WireCodec
from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.pools.kv_tiers import KVTiers
from sglang_kvspec.pools.page_records import PageRecords, copy_out
from sglang_kvspec.pools.tiered_kv import TieredKV
from sglang_kvspec.transport import Stream


class Packed(NamedTuple):
    """place: of the page among those packed. payload: 1-D uint8 on the CPU."""

    stream: Stream
    place: int
    payload: torch.Tensor


class PageWire(Protocol):
    """Pages of one KV cache as bytes. *_bytes: bounds of a page in each stream; residual_bytes 0:
    there is no second stream."""

    anchor_bytes: int
    residual_bytes: int

    def pack(self, pages: Sequence[int]) -> list[Packed]:
        """What is sent of encoded pages, one entry a page and stream."""
        ...

    def land(self, stream: Stream, pages: Sequence[int], payloads: Sequence[torch.Tensor]) -> None:
        """Put what has arrived of pages into the KV cache: ANCHOR first, into free pages, which
        drafts may read from then on; RESIDUAL makes them complete. Raises TransportError for
        payloads that are no page's."""
        ...


class SplitWire:
    """Anchors as they are, and residuals behind them (Lynx section 4.2)."""

    def __init__(self, kv: KVTiers) -> None:
        self._kv = kv
        sample = PageRecords.empty(kv.geometry, kv.codec, 1)
        self._anchor_shape, self._residual_shape = (
            sample.anchors.shape[1:],
            sample.residuals.shape[1:],
        )
        self.anchor_bytes, self.residual_bytes = sample.anchors.nbytes, sample.residuals.nbytes

    def pack(self, pages: Sequence[int]) -> list[Packed]:
        records = copy_out(self._kv, pages)
        parts = ((Stream.ANCHOR, records.anchors), (Stream.RESIDUAL, records.residuals))
        return [
            Packed(stream, place, page.reshape(-1))
            for stream, tensor in parts
            for place, page in enumerate(tensor)
        ]

    def land(self, stream: Stream, pages: Sequence[int], payloads: Sequence[torch.Tensor]) -> None:
        is_anchor = stream is Stream.ANCHOR
        shape = self._anchor_shape if is_anchor else self._residual_shape
        if any(payload.numel() != shape.numel() for payload in payloads):
            raise TransportError(f"a page of another size than {shape.numel()} bytes")
        # What goes to a GPU from pinned memory nobody waits for.
        is_pinned = self._kv.device.type == "cuda"
        records = torch.empty((len(pages), *shape), dtype=torch.uint8, pin_memory=is_pinned)
        torch.stack([payload.view(shape) for payload in payloads], out=records)
        if is_anchor:
            self._kv.begin_landing(pages)
            self._kv.write_anchors(pages, records)
            self._kv.finish_anchors(pages)
        else:
            self._kv.write_residuals(pages, records)
            self._kv.residuals.finish(pages)


class WholeWire:
    """Pages in one piece, as the baselines send them: what arrives is encoded anew, so that what
    decoding reads at the target precision is what the codec of the wire gives back. Where nobody
    drafts nobody reads anchors, and there are none."""

    residual_bytes = 0

    def __init__(self, kv: TieredKV, codec: WireCodec, *, drafts: bool) -> None:
        assert kv.codec.target == "exact", "another target would lose what the wire did not"
        self._kv, self._codec = kv, codec
        self._encode = kv.encode if drafts else kv.encode_exact
        self.anchor_bytes = codec.max_page_bytes

    def pack(self, pages: Sequence[int]) -> list[Packed]:
        ids = torch.tensor(pages, dtype=torch.int64)
        layers = [self._kv.read_target(layer, ids) for layer in range(self._kv.geometry.num_layers)]
        k, v = (torch.stack(part, dim=1) for part in zip(*layers, strict=True))
        return [
            Packed(Stream.ANCHOR, place, self._codec.encode(k[place], v[place]))
            for place in range(len(pages))
        ]

    def land(self, stream: Stream, pages: Sequence[int], payloads: Sequence[torch.Tensor]) -> None:
        assert stream is Stream.ANCHOR, "a page in one piece has no residual"
        decoded = [self._codec.decode(payload) for payload in payloads]
        k, v = (torch.stack(part) for part in zip(*decoded, strict=True))
        ids = torch.tensor(pages, dtype=torch.int64)
        self._kv.begin_encode(pages)
        for layer in range(self._kv.geometry.num_layers):
            self._encode(layer, ids, k[:, layer], v[:, layer])
        self._kv.finish_encode(pages)
