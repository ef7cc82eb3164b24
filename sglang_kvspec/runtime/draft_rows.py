"""Rows of a captured draft step, in fixed tensors that the step reads and advances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvspec_kernels.ops.steps import StepEnd, begin_step
from sglang_kvspec.core.config import MOST_RECENT_PAGES
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.target_rows import indptr
from sglang_kvspec.kv.transfers import send_into
from sglang_kvspec.planning.draft_budget import SINK_PAGES
from sglang_kvspec.runtime.draft_view import PageCounts
from sglang_kvspec.runtime.head_lists import HeadLists


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One request at the start of a round of drafts.

    token: the pending token, at `position`. past: encoded pages, int: [num_past] on the CPU, or
    [num_past, num_layers, num_kv_heads] of HeadLists. For a draft these are places of the pages'
    anchors, see AnchorPlaces.
    num_read: of these pages, how many the drafts read by attention mass; None for all. num_newest:
    last pages of `past` that are always read. slot: as RequestState.slot, where the mass is.
    tail: window slots of the pages that follow, including pages that drafts will fill. tail_len:
    tokens in the tail so far. num_drafts: steps that the request takes part in.
    """

    token: int
    position: int
    past: torch.Tensor
    tail: Sequence[int]
    tail_len: int
    num_drafts: int
    num_read: int | None = None
    num_newest: int = 0
    slot: int = 0

    @property
    def num_listed(self) -> int:
        """Entries of the lists of pages by layer and KV head."""
        return len(self.past) if self.num_read is None else self.num_read


class DraftRows:
    """Tensors of up to max_batch rows, one for each request, whose addresses never change. So a
    CUDA graph captured over the first n rows can be replayed for every step of every round.

    A step is begin_step(), forward, end_step(). It stores the KV of each row's token in its tail,
    attends, and takes the most likely token as the next input. A row that has taken its num_drafts
    steps writes nothing. A row without a request has no past, no tail and no effect.
    """

    def __init__(
        self,
        max_batch: int,
        max_steps: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
        tokens: torch.Tensor | None = None,
        lists: HeadLists | None = None,
        by_mass: bool = False,
    ) -> None:
        """max_pages: most pages of a request, past and tail together. tokens: [2, max_batch] int64
        memory of input_ids and positions; None allocates it. lists: where given, drafts read
        head_pages [max_batch * max_pages, *lists.shape] int32, with list_indptr, instead of
        past_pages. by_mass: the device fills head_pages, from past_pages."""
        self.page_size, self.device, self._by_mass = page_size, device, by_mass
        self.lists = lists
        self.max_batch, self.max_steps = max_batch, max_steps
        # Tail of a row: the newest full pages, full pages yet to leave, the page being filled, and
        # pages that drafts spill into.
        spill = -(-max_steps // page_size)
        self._max_tail = max_batch * (MOST_RECENT_PAGES + (spill + 1) + 1 + spill)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        if tokens is None:
            tokens = ints(2, max_batch, dtype=torch.int64)
        self.input_ids, self.positions = tokens
        self.past_indptr = ints(max_batch + 1)
        # Entries of DraftRow.past, of all rows.
        self.past_pages = ints(max_batch * max_pages)
        self.head_pages = None if lists is None else ints(max_batch * max_pages, *lists.shape)
        self.list_indptr = ints(max_batch + 1)
        self.mass_slots, self.num_newest = ints(max_batch), ints(max_batch)
        self.past_last = torch.full((max_batch,), page_size, dtype=torch.int32, device=device)
        self.tail_indptr = ints(max_batch + 1)
        self.tail_slots = ints(self._max_tail)
        self.tail_lens = ints(max_batch)
        self.slots = ints(max_batch)
        self.offsets = ints(max_batch)
        self.limits = ints(max_batch)
        self.step = ints(1, dtype=torch.int64)
        # Draft of row b in step s, at [s, b].
        self.drafts = ints(max_steps, max_batch, dtype=torch.int64)
        self._end = StepEnd(max_batch, device)

    def clear(self) -> None:
        """Remove the requests of all rows."""
        self.load([])

    def load(self, rows: Sequence[DraftRow], *, at_target: bool = False) -> None:
        """Set the first len(rows) rows and clear the others, for a round that starts at step 0.
        at_target: steps read pages at the target precision, so head_pages is not changed."""
        send_into(self.values_of(rows, at_target=at_target))
        self.begin_round()

    def begin_round(self) -> None:
        """Reset the step counter. load() does that; a caller that sends values_of() itself calls
        this."""
        self.step.zero_()

    def extend(self, tokens: torch.Tensor, num_steps: int) -> None:
        """Let the first len(tokens) rows take num_steps more steps. They must have taken all the
        steps that they were loaded for, and their tails must have slots for more. tokens: [rows]
        int64 on the device, the newest token of each row."""
        batch = len(tokens)
        # Use the tokens that rank 0 broadcast; the local argmax may differ.
        self.input_ids[:batch].copy_(tokens)
        self.limits[:batch] += num_steps
        # The last step of a row does not advance its position.
        self.positions[:batch] += 1
        self.begin_round()

    def values_of(
        self, rows: Sequence[DraftRow], *, at_target: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the (tensor, values) pairs for send_into() that set all rows. at_target: as in
        load()."""
        ends = [0] * (self.max_batch - len(rows))
        tail = torch.tensor([slot for row in rows for slot in row.tail], dtype=torch.int32)
        assert len(tail) <= self._max_tail, "the batch has more window pages than were allocated"
        scalars = torch.tensor(
            [
                [row.tail_len for row in rows] + ends,
                [row.tail_len + row.num_drafts for row in rows] + ends,
            ],
            dtype=torch.int32,
        )
        tokens = torch.tensor(
            [[row.token for row in rows] + ends, [row.position for row in rows] + ends]
        )
        values = self._past_values(rows, ends, at_target) | {
            "tail_indptr": indptr([*(len(row.tail) for row in rows), *ends]),
            "tail_slots": tail,
            "tail_lens": scalars[0],
            "limits": scalars[1],
            "input_ids": tokens[0],
            "positions": tokens[1],
        }
        return [(getattr(self, name)[: len(each)], each) for name, each in values.items()]

    def _past_values(
        self, rows: Sequence[DraftRow], ends: list[int], at_target: bool
    ) -> dict[str, torch.Tensor]:
        """Return the values of the tensors that tell which pages are read. ends: a 0 for each spare
        row."""
        pasts, values = [row.past for row in rows], {}
        assert sum(map(len, pasts)) <= len(self.past_pages), (
            "the batch has more pages than were allocated"
        )
        lists = None if at_target else self.lists
        if lists is not None:
            values["list_indptr"] = indptr([*(row.num_listed for row in rows), *ends])
        if lists is not None and not self._by_mass:
            return values | {"head_pages": lists.joined(pasts)}
        values["past_indptr"] = indptr([*map(len, pasts), *ends])
        values["past_pages"] = torch.cat([torch.empty(0, dtype=torch.int32), *pasts]).int()
        if lists is not None:
            fields = [[row.slot for row in rows] + ends, [row.num_newest for row in rows] + ends]
            values["mass_slots"], values["num_newest"] = torch.tensor(fields, dtype=torch.int32)
        return values

    def begin_step(self, batch: int) -> None:
        """Make room for one more token in the tails of the first `batch` rows. Sets `slots` (-1
        where nothing may be written) and `offsets`, and advances `tail_lens`."""
        begin_step(
            self.tail_indptr[: batch + 1],
            self.tail_slots,
            self.tail_lens[:batch],
            self.limits[:batch],
            self.slots[:batch],
            self.offsets[:batch],
            self.page_size,
        )

    def end_step(self, logits: torch.Tensor) -> None:
        """Store the most likely tokens of logits [batch, vocab] as drafts and as the next
        inputs."""
        batch = len(logits)
        self._end(
            logits,
            self.tail_lens[:batch],
            # Rows at their limits keep their positions, which stay within the model's range.
            self.limits[:batch],
            self.input_ids[:batch],
            self.positions[:batch],
            self.drafts,
            self.step,
        )

    def override(self, tokens: Sequence[int]) -> None:
        """Set the next inputs of the first len(tokens) rows, in place of the most likely tokens."""
        send_into([(self.input_ids[: len(tokens)], torch.tensor(tokens))])


def open_for_drafts(kv: PagedKVCache, position: int, pages: torch.Tensor, num_drafts: int) -> None:
    """Open the pages that a request writes when it drafts num_drafts tokens from `position` on.
    Call this for all requests of a round before the first draft_row(): opening a page can move
    other pages out of the window."""
    size = kv.geometry.page_size
    kv.open_pages(pages[position // size : (position + num_drafts) // size + 1].tolist())


def drafts_fit(kv: PagedKVCache, starts: Iterable[tuple[int, int]]) -> bool:
    """Return True if open_for_drafts() is sure to move nothing out of the window. starts:
    (position, num_drafts) of each request. The bound may count pages that are open already, so
    False does not mean that pages move."""
    size = kv.geometry.page_size
    most = sum(
        (position + num_drafts) // size - position // size + (position % size == 0)
        for position, num_drafts in starts
    )
    return most <= kv.window.slots.num_free


def draft_row(
    kv: PagedKVCache,
    token: int,
    position: int,
    pages: torch.Tensor,
    num_drafts: int,
    seen: torch.Tensor | None = None,
    counts: PageCounts | None = None,
    slot: int = 0,
    lists: HeadLists | None = None,
) -> DraftRow:
    """Return the row of a request whose pending token is at `position`; open the pages it will
    write.

    pages: page ids on the CPU, up to the page of the last draft. The tail begins with the first
    page from which on all pages up to `position` are in the window. Pages in the tail are always
    read. seen: as Row.seen. counts, slot: which of the other pages a MassView reads, and as
    RequestState.slot. lists: needed where `seen` is by layer and KV head.
    """
    size = kv.geometry.page_size
    open_for_drafts(kv, position, pages, num_drafts)
    last = (position + num_drafts) // size
    begin = num_before_window(kv, position, pages)
    num_read, num_newest = None, 0
    if counts is not None:
        num_newest = max(begin - counts.newest, 0)
        num_read = min(SINK_PAGES + counts.best + num_newest, begin)
    return DraftRow(
        token=token,
        position=position,
        past=_past(kv, pages[:begin], seen, slot, lists),
        num_read=num_read,
        num_newest=num_newest,
        slot=slot,
        tail=[kv.window.slots.slot_of(page) for page in pages[begin : last + 1].tolist()],
        tail_len=position - begin * size,
        num_drafts=num_drafts,
    )


def num_before_window(kv: PagedKVCache, position: int, pages: torch.Tensor) -> int:
    """Return how many full pages come before the window pages that end at `position`."""
    begin = position // kv.geometry.page_size
    while begin and int(pages[begin - 1]) in kv.window.slots:
        begin -= 1
    return begin


def _past(
    kv: PagedKVCache,
    pages: torch.Tensor,
    seen: torch.Tensor | None,
    slot: int,
    lists: HeadLists | None,
) -> torch.Tensor:
    """Return DraftRow.past of a row. pages: ids of the pages before its tail. The tail has all
    window pages, so without them lists of heads may differ in length."""
    places = kv.anchor_places
    if seen is not None and seen.ndim == 3:
        assert lists is not None, "pages are listed by layer and KV head"
        assert places.holds_all, "lists by layer and KV head are of pages that all have anchors"
        return lists.of(slot, pages, seen)
    past = pages if seen is None else pages[seen[seen < len(pages)]]
    return past if places.holds_all else places.of(past[places.have(past)])


def target_row(
    kv: PagedKVCache, token: int, position: int, pages: torch.Tensor, num_steps: int
) -> DraftRow:
    """Return the row of a request that takes num_steps plain steps; open the pages it will write.
    Its tail begins with the page of the pending token, at `position`. Full pages are read at the
    target precision, from their records."""
    size = kv.geometry.page_size
    first, last = position // size, (position + num_steps - 1) // size
    tail = pages[first : last + 1].tolist()
    kv.open_pages(tail)
    return DraftRow(
        token=token,
        position=position,
        past=pages[:first],
        tail=[kv.window.slots.slot_of(page) for page in tail],
        tail_len=position - first * size,
        num_drafts=num_steps,
    )
