"""Rows of a captured verification: the tokens of each request, and what they attend to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_kvspec.kv.target_rows import TargetRows


class VerifyRows:
    """Index tensors of up to max_tokens tokens of up to max_rows requests, or of their parts where
    rows are split by page. Their addresses never change. So a CUDA graph captured over the first
    tokens and parts can be replayed for every verification that fits.

    Unused tokens write nothing and belong to no part. Unused parts have no tokens.
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        max_parts: int,
        max_pages: int,
        max_past: int,
        max_tail: int,
        max_encoded: int,
        page_size: int,
        device: torch.device,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """max_parts: at least max_rows; launches may be made for more parts than ever occur.
        max_pages: most pages of a request, past and tail. max_past, max_tail: pages of all parts
        together. max_encoded: pages that requests fill
        before the last page that each writes to. tokens: [2, max_tokens] int64 memory of input_ids
        and positions; None allocates it."""
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.max_parts, self.max_encoded = max_parts, max_encoded
        self.max_pages = max_pages
        self.device = device

        def ints(count: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        if tokens is None:
            tokens = torch.zeros((2, max_tokens), dtype=torch.int64, device=device)
        self.input_ids, self.positions = tokens
        self.slots = ints(max_tokens, -1)
        self.offsets = ints(max_tokens)
        self.qo_indptr = ints(max_parts + 1)
        self.past_indptr = ints(max_parts + 1)
        self.past_pages = ints(max_past)
        self.past_last = ints(max_parts, page_size)
        self.tail_indptr = ints(max_parts + 1)
        self.tail_slots = ints(max_tail)
        self.tail_lens = ints(max_parts)
        self.encode_source = ints(max_encoded, -1)
        self.encode_pages = ints(max_encoded, -1)

    def has_room(self, rows: TargetRows) -> bool:
        return (
            rows.num_tokens <= self.max_tokens
            and len(rows.tail_lens) <= self.max_parts
            and len(rows.past_pages) <= len(self.past_pages)
            and len(rows.tail_slots) <= len(self.tail_slots)
            and len(rows.encode_pages) <= self.max_encoded
        )

    def clear(self) -> None:
        """Remove all tokens and parts."""
        for ends in (self.qo_indptr, self.past_indptr, self.tail_indptr, self.tail_lens):
            ends.zero_()
        for places in (self.slots, self.encode_source, self.encode_pages):
            places.fill_(-1)

    def values_of(
        self, rows: TargetRows, tokens: Sequence[int], positions: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the (tensor, values) pairs for send_into() that set the first tokens and parts,
        and clear the others. rows: of a plan whose rows are all VERIFY, and for which has_room()
        holds. tokens, positions: one for each token of the plan."""
        assert self.has_room(rows), "no captured CUDA graph fits this verification"
        assert len(tokens) == len(positions) == rows.num_tokens
        values = {
            "input_ids": torch.tensor(tokens),
            "positions": torch.tensor(positions),
            "slots": filled(rows.token_slots, self.max_tokens, -1),
            "offsets": rows.token_offsets,
            "past_pages": rows.past_pages,
            "tail_slots": rows.tail_slots,
            "tail_lens": filled(rows.tail_lens, self.max_parts, 0),
            "encode_source": filled(rows.encode_source, self.max_encoded, -1),
            "encode_pages": filled(rows.encode_pages, self.max_encoded, -1),
        }
        for name in ("qo_indptr", "past_indptr", "tail_indptr"):
            ends = getattr(rows, name)
            values[name] = filled(ends, self.max_parts + 1, int(ends[-1]))
        return [(getattr(self, name)[: len(each)], each) for name, each in values.items()]

    # Calls of a captured forward

    def begin_step(self, num_tokens: int) -> None:
        """Do nothing: values_of() describes all tokens of the verification."""

    def end_step(self, logits: torch.Tensor) -> None:
        """Do nothing: the logits are used outside of the graph."""


def filled(values: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """Return `values` [N], followed by `value` up to this length."""
    return torch.cat((values, values.new_full((length - len(values),), value)))
