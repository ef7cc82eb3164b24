"""How full pages cross between two servers: split into anchors and residuals, or in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from sglang_kvspec.codecs.wire import WireCodec
from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.pools.kv_tiers import KVTiers
from sglang_kvspec.pools.page_records import PageRecords
from sglang_kvspec.transport import Stream

# Of plain KV that a codec works on at a time, unless a single page is more: beside that it needs
# CODEC_WORK times as much of the device.
AT_ONCE_BYTES = 32 << 20
CODEC_WORK = 8


class PageWire(Protocol):
    """Pages of one KV cache as bytes. *_bytes: bounds of a page in each stream; residual_bytes 0:
    there is no second stream."""

    anchor_bytes: int
    residual_bytes: int

    def pack(self, stream: Stream, pages: Sequence[int]) -> list[torch.Tensor]:
        """What is sent of encoded pages in a stream that is there: each 1-D uint8 on the CPU.
        Raises CodecError for what the wire cannot carry."""
        ...

    def check(self, stream: Stream, num_bytes: int) -> None:
        """Raises TransportError where a page's payload cannot have so many bytes."""
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

    def pack(self, stream: Stream, pages: Sequence[int]) -> list[torch.Tensor]:
        assert all(map(self._kv.is_encoded, pages)), "only an encoded page has records"
        is_anchor = stream is Stream.ANCHOR
        records = self._kv.read_anchors(pages) if is_anchor else self._kv.read_residuals(pages)
        return [page.reshape(-1) for page in records]

    def check(self, stream: Stream, num_bytes: int) -> None:
        size = self._shape(stream).numel()
        if num_bytes != size:
            raise TransportError(f"a page of another size than {size} bytes")

    def land(self, stream: Stream, pages: Sequence[int], payloads: Sequence[torch.Tensor]) -> None:
        is_anchor, shape = stream is Stream.ANCHOR, self._shape(stream)
        for payload in payloads:
            self.check(stream, payload.numel())
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

    def _shape(self, stream: Stream) -> torch.Size:
        return self._anchor_shape if stream is Stream.ANCHOR else self._residual_shape


class WholeWire:
    """Pages in one piece, as the baselines send them: what arrives is encoded anew, so that what
    decoding reads at the target precision is what the codec of the wire gives back. Where nobody
    drafts nobody reads anchors, and there are none."""

    residual_bytes = 0

    def __init__(self, kv: KVTiers, codec: WireCodec, *, drafts: bool) -> None:
        assert kv.codec.target == "exact", "another target would lose what the wire did not"
        self._kv, self._codec, self._drafts = kv, codec, drafts
        self.anchor_bytes = codec.max_page_bytes
        self._pages_at_once = max(1, AT_ONCE_BYTES // kv.geometry.plain_page_bytes)

    def pack(self, stream: Stream, pages: Sequence[int]) -> list[torch.Tensor]:
        assert stream is Stream.ANCHOR, "a page in one piece has no residual"
        payloads: list[torch.Tensor] = []
        for part in self._parts(len(pages)):
            payloads += self._codec.encode_pages(*self._kv.read_whole(pages[part]))
        return payloads

    def check(self, stream: Stream, num_bytes: int) -> None:
        """Sizes vary with what is coded: decoding finds out."""

    def land(self, stream: Stream, pages: Sequence[int], payloads: Sequence[torch.Tensor]) -> None:
        assert stream is Stream.ANCHOR, "a page in one piece has no residual"
        for part in self._parts(len(pages)):
            k, v = self._codec.decode_pages(payloads[part], self._kv.device)
            self._kv.write_whole(pages[part], k, v, anchors=self._drafts)

    def _parts(self, num_pages: int) -> Iterator[slice]:
        for first in range(0, num_pages, self._pages_at_once):
            yield slice(first, first + self._pages_at_once)
