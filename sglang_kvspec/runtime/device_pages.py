"""Attention mass of pages on a GPU, and the lists of pages that drafts read there."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvspec_kernels.ops.capture import captured_graph
from kvspec_kernels.ops.page_selection import PageSelection, ScoredRequests, SelectedLists
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import indptr
from sglang_kvspec.kv.transfers import send_into
from sglang_kvspec.planning.draft_budget import SINK_PAGES
from sglang_kvspec.runtime.device_queries import DeviceQueries
from sglang_kvspec.runtime.draft_rows import DraftRows, num_before_window
from sglang_kvspec.runtime.draft_view import MassView, PageCounts
from sglang_kvspec.runtime.phase_timer import TotalTimer
from sglang_kvspec.runtime.request_state import RequestState


def nbytes_of(
    geometry: KVGeometry,
    num_qo_heads: int,
    max_batch: int,
    most_pages: int,
    max_draft_len: int,
    most_queries: int,
) -> int:
    """Return about how many bytes the queries, scores, masses and lists of pages take."""
    rows = max_batch * most_pages * geometry.num_kv_heads * 4
    per_token = geometry.num_layers * num_qo_heads * geometry.head_dim * geometry.dtype.itemsize
    queries = max_batch * max(most_queries, max_draft_len + 1) * per_token
    scores = rows * most_queries * num_qo_heads // geometry.num_kv_heads
    # A mass and a list entry for each page of each layer and KV head.
    return queries + scores + 2 * rows * geometry.num_layers


class DevicePages:
    """The engine's PageScorer on a GPU, and the selection of pages by its scores.

    Queries of verified tokens attend to the anchors of the pages before the recent window, in one
    CUDA graph for all layers. The mass of a request stays in its slot. Nothing waits for the
    device, and only the number of pages that a request reads is known to the CPU.
    """

    def __init__(
        self,
        kv: GpuKVCache,
        queries: DeviceQueries,
        view: MassView,
        max_batch: int,
        num_slots: int,
        most_pages: int,
    ) -> None:
        """max_batch: requests of a call. num_slots: values of RequestState.slot. most_pages: of a
        request."""
        self._kv, self._queries, self._view = kv, queries, view
        geometry, device = kv.geometry, kv.device
        self._selection = PageSelection(
            max_batch,
            max_batch * most_pages,
            num_slots,
            most_pages,
            geometry.num_layers,
            queries.by_layer.shape[2],
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.page_size,
            queries.most,
            settings=kv.codec.settings,
            q_dtype=geometry.dtype,
            device=device,
            backend=kv.kernels,
        )

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._max_batch = max_batch
        self._requests = ScoredRequests(
            ints(max_batch + 1), ints(max_batch * most_pages), *(ints(max_batch) for _ in range(4))
        )
        self._timer = TotalTimer(device)
        self._graph = self._capture()

    def _capture(self) -> torch.cuda.CUDAGraph:
        # Compile all kernels first, so that no request waits for them.
        self._score_layers(1)
        geometry, (ends, pages, *fields) = self._kv.geometry, self._requests
        lists = pages.new_empty((1, geometry.num_layers, geometry.num_kv_heads))
        unused = SelectedLists(ends, pages, fields[0], ends, fields[1])
        self._selection.select(unused, lists, num_first=SINK_PAGES)
        torch.cuda.synchronize()
        with captured_graph() as graph:
            self._score_layers(self._kv.geometry.num_layers)
        return graph

    def _score_layers(self, num_layers: int) -> None:
        for layer in range(num_layers):
            q, anchors = self._queries.by_layer[layer], self._kv.anchors.layer(layer)
            self._selection.score(layer, q, anchors, self._requests)

    def score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        """Enqueue the scores of requests that committed tokens, see PageScorer."""
        fields, lists = [], []
        for index, state, pages in committed:
            begin, count = self._queries.before(index, state.committed_len)
            num_past = num_before_window(self._kv, state.committed_len, pages)
            if not count or not num_past:
                continue
            fields.append((begin, count, state.slot, min(state.num_scored, num_past)))
            lists.append(pages[:num_past].int())
            state.num_scored = num_past
        if not lists:
            return
        spare = [(0, 0, 0, 0)] * (self._max_batch - len(fields))
        ends = indptr([*map(len, lists), *(0 for _ in spare)])
        by_field = torch.tensor([*fields, *spare], dtype=torch.int32).T.contiguous()
        requests, pages = self._requests, torch.cat(lists)
        given = zip(requests[2:], by_field, strict=True)
        send_into([(requests.indptr, ends), (requests.indices[: len(pages)], pages), *given])
        with self._timer:
            self._graph.replay()

    def counts(self, state: RequestState, num_pages: int) -> PageCounts | None:
        """Return how many of a request's pages its drafts read, see MassView.counts."""
        return self._view.counts(state, num_pages)

    def select(self, rows: DraftRows) -> None:
        """Enqueue the selection of the pages of all rows, into the lists that their steps read."""
        assert rows.head_pages is not None
        lists = SelectedLists(
            rows.past_indptr, rows.past_pages, rows.mass_slots, rows.list_indptr, rows.num_newest
        )
        with self._timer:
            self._selection.select(lists, rows.head_pages, num_first=SINK_PAGES)

    def mass_read(self, state: RequestState) -> float:
        """Return the mass that a request's drafts read, see PageScorer. The CPU has waited for a
        verification of these drafts."""
        return 1 - float(self._selection.unread[state.slot])

    @property
    def selection_s(self) -> float:
        """Return the seconds of all scores and selections, see PageScorer."""
        return self._timer.seconds
