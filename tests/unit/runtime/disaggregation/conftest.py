"""A prefill server's KV cache and a decode server's, joined by a link that delivers on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.codecs.wire import make_wire_codec
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.runtime.disaggregation.arrivals import Arrivals
from sglang_kvspec.runtime.disaggregation.departures import Departures
from sglang_kvspec.runtime.disaggregation.handover import HandoverFormat
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire, SplitWire, WholeWire
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.transport import (
    LinkState,
    PageArrived,
    SegmentKey,
    SegmentReleased,
    Stream,
    StreamArrived,
    TransferEnded,
    TransferFailed,
    TransferOpened,
)

ROOM = 7
PREFILL_ENDED = 1000.0
FIELDS = (b"first token     ", b"a log-probability")
SIZE = 32


class Link:
    """Both ends of a link, on which nothing arrives before deliver()."""

    def __init__(self) -> None:
        self.offers: dict[SegmentKey, memoryview] = {}
        self.expected: dict = {}
        self.to_sender: list = []
        self.to_receiver: list = []
        self.cancelled: dict[int, str] = {}
        self.aborted: dict[int, str] = {}
        # Delivered pages of each transfer and stream.
        self.num_delivered: Counter = Counter()

    # Methods of a sender's loop

    def offer(self, key: SegmentKey, memory: memoryview) -> None:
        assert key not in self.offers, "a segment is offered once"
        self.offers[key] = memory

    def abort(self, transfer: int, reason: str) -> None:
        self.aborted[transfer] = reason

    # Methods of a receiver's loop

    def expect(self, transfer, pages, shape, destination, timeout_s) -> None:
        self.expected[transfer] = (list(pages), shape, destination)
        for stream in Stream:
            self.num_delivered.pop((transfer, stream), None)
        self.to_sender.append(TransferOpened(transfer))

    def cancel(self, transfer: int, reason: str) -> None:
        self.cancelled[transfer] = reason
        self.expected.pop(transfer, None)
        self.to_receiver.append(TransferFailed(transfer, reason))

    def take_events(self) -> list:
        raise NotImplementedError

    def end(self, name: str) -> SimpleNamespace:
        """Return the object that one side holds."""
        inbox = self.to_sender if name == "sender" else self.to_receiver

        def take_events() -> list:
            taken = list(inbox)
            inbox.clear()
            return taken

        return SimpleNamespace(
            offer=self.offer,
            abort=self.abort,
            expect=self.expect,
            cancel=self.cancel,
            take_events=take_events,
            num_parts=1,
            state=LinkState.LIVE,
            refusal=None,
        )

    def deliver(self, streams: Iterable[Stream] = Stream, at: Sequence[int] | None = None) -> None:
        """Deliver the pages of these streams, or those of them at these indices, in reverse
        order."""
        for transfer, (pages, shape, destination) in self.expected.items():
            for stream in streams:
                keys = [
                    key
                    for key in self.offers
                    if key.transfer == transfer
                    and key.stream is stream
                    and (at is None or key.page_index in at)
                ]
                for key in reversed(keys):
                    memory = self.offers.pop(key)
                    self.to_sender.append(SegmentReleased(key))
                    page, generation = pages[key.page_index]
                    destination.view(stream, page, generation, 0)[: len(memory)] = memory
                    sizes = (len(memory),)
                    arrived = PageArrived(transfer, stream, key.page_index, sizes)
                    self.to_receiver.append(arrived)
                    self.num_delivered[transfer, stream] += 1
                if keys and self.num_delivered[transfer, stream] == shape.num_segments(stream):
                    self.to_receiver.append(StreamArrived(transfer, stream, 0.0))
            if all(self.num_delivered[transfer, s] == shape.num_segments(s) for s in Stream):
                self.to_sender.append(TransferEnded(transfer, None))


@dataclass
class Request:
    """k, v [layers, num_tokens, heads, head_dim] of a prompt, and its pages on each side."""

    k: torch.Tensor
    v: torch.Tensor
    prefill_pages: list[int]
    decode_pages: list[int]

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]

    @property
    def token_ids(self) -> range:
        return range(self.num_tokens)


class Lab:
    """A prefill and a decode server. `prefill` and `decode` are their ReferenceKVCaches; departures
    and arrivals are joined by `link`. mode: a value of --kvspec-transfer, or `packed`: `split` with
    packed residuals."""

    def __init__(
        self,
        make_kv: Callable[..., ReferenceKVCache],
        mode: str,
        target: str,
        ranks: Ranks | None = None,
        **limits: int,
    ) -> None:
        options = {"num_pages": 12, "num_layers": 2, "page_size": SIZE, "target": target}
        if mode == "packed":
            options |= {"packs": True, "dtype": torch.bfloat16}
        self.kv_options = options
        self.prefill = make_kv(window_pages=3, cache_pages=2, **options)
        self.decode = make_kv(window_pages=3, cache_pages=2, **options)
        self.link = Link()
        self.sender_end, self.receiver_end = self.link.end("sender"), self.link.end("receiver")
        self.departures = Departures(
            self.prefill,
            wire(self.prefill, mode),
            self.sender_end,
            self.format,
            self.clock,
            **limits,
        )
        self.arrivals = Arrivals(
            self.decode,
            wire(self.decode, mode),
            self.format,
            mode="split" if mode == "packed" else mode,
            ranks=ranks,
            clock=self.clock,
        )
        self.now = PREFILL_ENDED - 1

    def clock(self) -> float:
        return self.now

    @property
    def format(self) -> HandoverFormat:
        page = self.prefill.plan.page_bytes
        sizes = tuple(map(len, FIELDS))
        return HandoverFormat(self.prefill.geometry, sizes, page.anchor + page.residual)

    def request(self, num_tokens: int, seed: int = 0) -> Request:
        """Make a prefilled prompt. Full pages are encoded or in the window, and the last page is in
        the window."""
        g = self.prefill.geometry
        rng = torch.Generator().manual_seed(seed)
        shape = (2, g.num_layers, num_tokens, g.num_kv_heads, g.head_dim)
        return self.prefilled(*torch.randn(shape, generator=rng).to(g.dtype))

    def prefilled(self, k: torch.Tensor, v: torch.Tensor) -> Request:
        num_pages = -(-k.shape[1] // SIZE)
        pages = list(range(1, num_pages + 1))
        request = Request(k, v, pages, [12 - page for page in pages])
        for index, page in enumerate(pages):
            self.fill(request, index, page)
        return request

    def fill(self, request: Request, index: int, page: int) -> None:
        """Write a page as a prefill does: the newest two pages stay in the window, and the others
        are encoded."""
        num_pages = len(request.prefill_pages)
        span = slice(index * SIZE, min((index + 1) * SIZE, request.num_tokens))
        k, v = request.k[:, span], request.v[:, span]
        ids = torch.tensor([page])
        if index < num_pages - 2:
            self.prefill.begin_encode([page])
            for layer in range(len(k)):
                self.prefill.encode(layer, ids, k[layer][None], v[layer][None])
            self.prefill.finish_encode([page])
            return
        self.prefill.open_pages([page])
        count = k.shape[1]
        for layer in range(len(k)):
            where = torch.full((count,), page)
            self.prefill.window.write(layer, where, torch.arange(count), k[layer], v[layer])
        if count == SIZE:
            self.prefill.window.mark_committed(page)

    def send(self, request: Request, room: int = ROOM) -> None:
        """Send all pages, in two chunks. The second chunk follows a second after the prefill."""
        pages = request.prefill_pages
        middle = (len(pages) - 1) // 2
        self.departures.send(room, pages[:middle])
        self.now = PREFILL_ENDED
        self.departures.note_prompt(room, request.token_ids)
        self.now += 1
        tail = request.num_tokens - SIZE * (len(pages) - 1)
        self.departures.send_last(room, pages[middle:], tail, FIELDS)

    def move(self, request: Request) -> None:
        """Move the request from the prefill side to the decode side, where it is admitted."""
        self.departures.add(ROOM)
        self.expect(request)
        self.send(request)
        self.link.deliver()
        self.pump()
        self.arrivals.admit(ROOM, request.decode_pages[-1])

    def expect(self, request: Request, room: int = ROOM) -> None:
        self.arrivals.expect(room, self.receiver_end, request.decode_pages, 60.0)

    def pump(self) -> None:
        self.arrivals.pump(self.receiver_end)
        self.decode.check_integrity()

    def target(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k, v [layers, num_tokens, ...] as verifications read them on the decode side."""
        ids = torch.tensor(request.decode_pages)
        return self._read(self.decode.read_target, ids, request)

    def draft(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(self.decode.read_draft, torch.tensor(request.decode_pages), request)

    def prefill_draft(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(self.prefill.read_draft, torch.tensor(request.prefill_pages), request)

    def prefill_target(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(self.prefill.read_target, torch.tensor(request.prefill_pages), request)

    def _read(self, read, ids, request):
        layers = [read(layer, ids) for layer in range(self.decode.geometry.num_layers)]
        k, v = (torch.stack(part).flatten(1, 2) for part in zip(*layers, strict=True))
        return k[:, : request.num_tokens], v[:, : request.num_tokens]


def wire(kv: PagedKVCache, mode: str):
    if mode in ("split", "packed"):
        return SplitWire(kv)
    # Only lossless KV can be verified, and so drafted on.
    return WholeWire(kv, make_wire_codec(mode, kv.geometry), drafts=mode == "full")


@pytest.fixture
def make_lab(make_kv: Callable[..., ReferenceKVCache]) -> Callable[..., Lab]:
    return lambda mode="split", target="exact", **limits: Lab(make_kv, mode, target, **limits)


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    return make_lab()


@pytest.fixture
def make_wire() -> Callable[..., PageWire]:
    return wire


@pytest.fixture
def make_link() -> type[Link]:
    return Link
