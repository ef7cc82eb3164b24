"""Comparison of DeviceAttention with ReferenceAttention on the same requests, output by output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.core.config import Target
from sglang_kvspec.core.seams import TARGET_ATTENTIONS
from sglang_kvspec.kv.copy_streams import CopyStreams
from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind, prefill_row
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.planning.capacity import CapacityPlan, PageBytes
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import DraftRows, draft_row
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.reference_attention import ReferenceAttention
from sglang_kvspec.runtime.target_attention import TargetAttention

RECENT = 1
WINDOW_PAGES = 12


class AttentionPair:
    """A GpuKVCache with a residual cache of cache_pages and a host store, and a ReferenceKVCache
    that caches everything. Page ids are shuffled on purpose, and freed ids are reused first."""

    def __init__(
        self,
        codec_name: str,
        target: Target,
        geometry: KVGeometry,
        device: torch.device,
        *,
        num_qo_heads: int,
        num_pages: int,
        cache_pages: int,
        tolerance: float,
        copy_streams: CopyStreams | None = None,
        attention: type[TargetAttention] | None = None,
        packs: bool = False,
    ) -> None:
        """tolerance: largest relative error of outputs, in the norm over a head. attention: target
        attention, by default the registered one of `target`. packs: the store holds packed
        residuals."""
        codec = make_codec(
            codec_name,
            target=target,
            page_size=geometry.page_size,
            head_dim=geometry.head_dim,
            dtype=geometry.dtype,
            packs=packs,
        )
        self.geometry, self.num_qo_heads, self.tolerance = geometry, num_qo_heads, tolerance

        def plan(cached: int, hosted: int) -> CapacityPlan:
            bytes_of = PageBytes(1, 1, 1)
            return CapacityPlan(num_pages, WINDOW_PAGES, cached, hosted, bytes_of, "test")

        cpu = torch.device("cpu")
        self.reference_kv = ReferenceKVCache(geometry, codec, plan(num_pages, 0), cpu)
        self.kv = GpuKVCache(geometry, codec, plan(cache_pages, num_pages), device, copy_streams)
        self.reference = ReferenceAttention(self.reference_kv)
        make: type[TargetAttention] = attention or TARGET_ATTENTIONS.load(target)
        self.attention = DeviceAttention(self.kv, num_qo_heads, make(self.kv, num_qo_heads))
        self._keepers = (PageKeeper(self.reference_kv, RECENT), PageKeeper(self.kv, RECENT))
        self._rng = torch.Generator().manual_seed(1)
        self._free = (torch.randperm(num_pages, generator=self._rng) + 1).tolist()
        self.pages: dict[str, list[int]] = {}
        self.committed: dict[str, int] = {}

    def prefill(self, **lengths: int) -> None:
        """Append lengths[name] tokens to each request, and commit them."""
        rows = {}
        for name, length in lengths.items():
            start = self.committed.get(name, 0)
            ids, size = self.page_ids(name, start + length), self.geometry.page_size
            rows[name] = prefill_row(start, length, ids, page_size=size, recent_pages=RECENT)
        self._forward(rows, lengths)

    def verify(self, accepted: dict[str, int] | None = None, **lengths: int) -> None:
        """Verify lengths[name] tokens of each request. Commit `accepted` of them, or all."""
        self._forward(self.verify_rows(lengths), lengths | (accepted or {}))

    def repeat(self, **lengths: int) -> None:
        """Run lengths[name] tokens behind the committed ones of each request, and store nothing."""
        rows = {}
        for name, length in lengths.items():
            start = self.committed[name]
            rows[name] = Row(RowKind.REPEAT, start, length, self.page_ids(name, start))
        self._forward(rows, dict.fromkeys(rows, 0))

    def verify_rows(self, lengths: dict[str, int]) -> dict[str, Row]:
        """Return rows of lengths[name] tokens after the committed tokens of each request."""
        rows = {}
        for name, length in lengths.items():
            start = self.committed[name]
            rows[name] = Row(RowKind.VERIFY, start, length, self.page_ids(name, start + length))
        return rows

    def draft(
        self,
        rows: DraftRows,
        done: int,
        seen: Mapping[str, torch.Tensor] | None = None,
        **lengths: int,
    ) -> None:
        """Add lengths[name] drafts to each request, longest first, after the `done` drafts that
        each has. rows: DraftRows of this batch size. seen: Row.seen of some requests, with all
        pages of the window."""
        seen = seen or {}
        ids = {
            name: self.page_ids(name, self.committed[name] + done + n + 1)
            for name, n in lengths.items()
        }
        starts = {name: self.committed[name] + done for name in lengths}
        round_rows = [
            draft_row(
                self.kv, 0, starts[name], ids[name], n, seen.get(name), slot=i, lists=rows.lists
            )
            for i, (name, n) in enumerate(lengths.items())
        ]
        rows.load(round_rows)
        attended = self.attention.make_draft_step(rows, len(lengths))
        attended.plan(round_rows)
        self.attention.begin_steps(rows, attended)
        for step in range(max(lengths.values())):
            going = [name for name, n in lengths.items() if n > step]
            plan = ForwardPlan(
                tuple(
                    Row(RowKind.DRAFT, starts[name] + step, 1, ids[name], seen=seen.get(name))
                    for name in going
                )
            )
            rows.begin_step(len(lengths))
            with self.reference.planned(plan):
                for layer in range(self.geometry.num_layers):
                    self._attend(layer, len(lengths), len(going))
            rows.end_step(torch.zeros(len(lengths), 10, device=self.kv.device))
        self.attention.end_captured()

    def free(self, *names: str) -> None:
        """Drop these requests, and free their pages."""
        for name in names:
            ids = self.pages.pop(name)
            del self.committed[name]
            for kv in (self.reference_kv, self.kv):
                kv.free_pages(ids)
            self._free += ids

    def page_ids(self, name: str, num_tokens: int) -> torch.Tensor:
        ids = self.pages.setdefault(name, [])
        num_pages = -(-num_tokens // self.geometry.page_size)
        while len(ids) < num_pages:
            ids.append(self._free.pop())
        return torch.tensor(ids[:num_pages])

    def encoded(self, names: Iterable[str]) -> list[int]:
        """Return the encoded pages of requests."""
        return [page for name in names for page in self.pages[name] if self.kv.is_encoded(page)]

    def _forward(self, rows: dict[str, Row], committed: dict[str, int]) -> None:
        plan = ForwardPlan(tuple(rows.values()))
        with self.reference.planned(plan), self.attention.planned(plan):
            for layer in range(self.geometry.num_layers):
                self._attend(layer, plan.num_tokens, plan.num_tokens)
        self.commit(rows, committed)

    def commit(self, rows: dict[str, Row], committed: dict[str, int]) -> None:
        """Commit committed[name] of the tokens that a forward over these rows added."""
        for name, row in rows.items():
            end = row.start + committed[name]
            for keeper in self._keepers:
                keeper.commit(row.pages, row.start, end)
            self.committed[name] = end
        for keeper in self._keepers:
            keeper.flush()
        for kv in (self.reference_kv, self.kv):
            kv.check_integrity()

    def _attend(self, layer: int, num_tokens: int, num_real: int) -> None:
        """Attend to num_tokens new tokens. The reference gets only the first num_real, and both
        sides' outputs for these are compared."""
        scale = self.geometry.head_dim**-0.5
        q, k, v = self.draw(num_tokens)
        want = self.reference.forward(layer, q[:num_real], k[:num_real], v[:num_real], scale)
        q, k, v = (part.to(self.kv.device) for part in (q, k, v))
        self.compare(self.attention.forward(layer, q, k, v, scale)[:num_real], want)

    def draw(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Slices of one tensor, as from a model's projection.
        heads, kv_heads = self.num_qo_heads, self.geometry.num_kv_heads
        shape = (num_tokens, heads + 2 * kv_heads, self.geometry.head_dim)
        every = torch.randn(shape, generator=self._rng).to(self.geometry.dtype)
        v_first = heads + kv_heads
        return every[:, :heads], every[:, heads:v_first], every[:, v_first:]

    def compare(self, got: torch.Tensor, want: torch.Tensor) -> None:
        difference = (got.cpu().float() - want.float()).norm(dim=-1)
        error = difference / want.float().norm(dim=-1)
        worst = float(error.max())
        assert worst < self.tolerance, (
            f"relative error {worst:.3g} at {int(error.argmax())}, allowed {self.tolerance:.3g}"
        )
