"""Index tensors of a target forward on a GPU: where tokens go, and what they attend to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Index tensors on the CPU of the prefill or verify rows of one forward.

    A query attends to encoded past pages and, causally, to a tail of full-precision pages. Rows
    write their tokens to the tail pool and find their tail there. The tail pool of verify rows is
    the recent window; that of prefill and repeat rows is a scratch pool of num_scratch pages.

    qo_indptr [N + 1], past_indptr [N + 1], past_pages, tail_indptr [N + 1], tail_slots, tail_lens
    [N]: int32; N is the number of rows, or of their parts where rows are split by page.
    token_slots, token_offsets: [num_tokens] int64, each token's place in the tail pool.
    encode_source, encode_pages: [E] int32, tail-pool pages to encode before attention, and their
    page ids. fill_scratch, fill_window: [F] int64, scratch pages to fill first from window pages.
    keep_scratch, keep_window: [W] int64, scratch pages to copy to window pages.
    """

    num_tokens: int
    num_scratch: int
    max_qo_len: int
    qo_indptr: torch.Tensor
    past_indptr: torch.Tensor
    past_pages: torch.Tensor
    tail_indptr: torch.Tensor
    tail_slots: torch.Tensor
    tail_lens: torch.Tensor
    token_slots: torch.Tensor
    token_offsets: torch.Tensor
    encode_source: torch.Tensor
    encode_pages: torch.Tensor
    fill_scratch: torch.Tensor
    fill_window: torch.Tensor
    keep_scratch: torch.Tensor
    keep_window: torch.Tensor

    @property
    def begins_pages(self) -> bool:
        """True if all rows have scratch pages and start a page: a tail has only its row's
        tokens."""
        return self.num_scratch > 0 and len(self.fill_scratch) == 0


def target_rows(
    plan: ForwardPlan, page_size: int, slot_of: Callable[[int], int], *, split_by_page: bool
) -> TargetRows:
    """Return the indices of a plan whose rows are all PREFILL, all REPEAT or all VERIFY, with pages
    on the CPU. REPEAT rows cannot be split by page: pages that they fill are not encoded.

    slot_of: window slot of a page. split_by_page: for the int8 target. A token then sees its own
    page in full precision and every page before it at 8 bits, even pages that its own row fills.
    """
    builder = _Builder(page_size, slot_of, split_by_page)
    for row in plan.rows:
        builder.add(row)
    return builder.build(plan.num_tokens)


class _Builder:
    def __init__(self, page_size: int, slot_of: Callable[[int], int], split_by_page: bool) -> None:
        self.size, self.slot_of, self.split = page_size, slot_of, split_by_page
        self.num_scratch = 0
        self.qo_lens: list[int] = []
        self.pasts: list[torch.Tensor] = []
        self.tails: list[list[int]] = []
        self.tail_lens: list[int] = []
        self.slots: list[torch.Tensor] = []
        self.offsets: list[torch.Tensor] = []
        self.encode: list[tuple[int, int]] = []
        self.fill: list[tuple[int, int]] = []
        self.keep: list[tuple[int, int]] = []

    def add(self, row: Row) -> None:
        size = self.size
        written, held = row.written_pages(size), row.held_pages(size)
        ids = row.pages[written.start : written.stop].tolist()
        if row.kind is not RowKind.VERIFY:
            assert not (self.split and row.kind is RowKind.REPEAT), "a repeat cannot be split"
            places = list(range(self.num_scratch, self.num_scratch + len(held)))
            self.num_scratch += len(held)
            if row.start % size:
                self.fill.append((places[0], self.slot_of(int(row.pages[held.start]))))
            self.keep += [
                (place, self.slot_of(page))
                for place, page, index in zip(places[: len(ids)], ids, written, strict=True)
                if index not in row.direct
            ]
        else:
            places = [self.slot_of(page) for page in ids]
        positions = torch.arange(row.start, row.end)
        self.slots.append(torch.tensor(places)[positions // size - held.start])
        self.offsets.append(positions % size)
        last = written.stop - 1
        # A repeat writes no pages.
        for place, page, index in zip(places[: len(ids)], ids, written, strict=True):
            if index in row.direct or (self.split and index < last):
                self.encode.append((place, page))
        if not self.split:
            self._add_part(row, row.start, row.end, held.start, places)
            return
        for place, index in zip(places, written, strict=True):
            begin, end = max(row.start, index * size), min(row.end, (index + 1) * size)
            self._add_part(row, begin, end, index, [place])

    def _add_part(self, row: Row, begin: int, end: int, first: int, tail: list[int]) -> None:
        """Add queries begin .. end - 1, which see the pages before index `first`, then `tail`."""
        self.qo_lens.append(end - begin)
        self.pasts.append(row.pages[:first])
        self.tails.append(tail)
        self.tail_lens.append(end - first * self.size)

    def build(self, num_tokens: int) -> TargetRows:
        encode, fill, keep = (_columns(pairs) for pairs in (self.encode, self.fill, self.keep))
        return TargetRows(
            num_tokens=num_tokens,
            num_scratch=self.num_scratch,
            max_qo_len=max(self.qo_lens, default=1),
            qo_indptr=indptr(self.qo_lens),
            past_indptr=indptr(map(len, self.pasts)),
            past_pages=torch.cat(self.pasts).int(),
            tail_indptr=indptr(map(len, self.tails)),
            tail_slots=torch.tensor([slot for tail in self.tails for slot in tail]).int(),
            tail_lens=torch.tensor(self.tail_lens, dtype=torch.int32),
            token_slots=torch.cat(self.slots),
            token_offsets=torch.cat(self.offsets),
            encode_source=encode[0].int(),
            encode_pages=encode[1].int(),
            fill_scratch=fill[0],
            fill_window=fill[1],
            keep_scratch=keep[0],
            keep_window=keep[1],
        )


def indptr(lens: Iterable[int]) -> torch.Tensor:
    """Return the offsets [N + 1] int32 of consecutive runs of these lengths."""
    sums = torch.tensor([0, *lens], dtype=torch.int64).cumsum(0)
    return sums.to(torch.int32)


def _columns(pairs: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
