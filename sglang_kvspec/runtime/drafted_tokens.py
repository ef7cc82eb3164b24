"""Drafts that a device has made and the CPU has not seen yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_kvspec.kv.transfers import to_device


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Drafts that only the device has. Their verification can be enqueued before the CPU waits for
    them.

    tokens: [steps, columns] int64; column c holds the drafts of request order[c], lens[order[c]] of
    them. order: -1 stands for a request that has left.
    """

    tokens: torch.Tensor
    order: Sequence[int]
    lens: Sequence[int]

    @classmethod
    def of_one_step(
        cls, tokens: torch.Tensor, order: Sequence[int], num_requests: int
    ) -> DraftedTokens:
        """Return one draft of each request in `order`. tokens: [1, columns]. num_requests: size of
        the batch."""
        lens = [0] * num_requests
        for i in order:
            lens[i] = 1
        return cls(tokens, order, lens)

    def rearranged(self, places: Mapping[int, int], lens: Sequence[int]) -> DraftedTokens:
        """Return the drafts for a changed batch. places: new index of request i; a request without
        one has left. lens: by new index."""
        return DraftedTokens(self.tokens, [places.get(i, -1) for i in self.order], lens)

    def place(
        self, input_ids: torch.Tensor, firsts: Sequence[int], lasts: Sequence[int] | None = None
    ) -> None:
        """Write drafts into input_ids [num_tokens]. firsts: index of the first draft of request i,
        if the request verifies, else -1. lasts: index of the last draft of request i, if the
        request drafts on from it, else -1."""
        columns = self.tokens.shape[1]
        pairs: list[tuple[int, int]] = []
        for column, i in enumerate(self.order):
            if i < 0:
                continue
            if firsts[i] >= 0:
                steps = range(self.lens[i])
                pairs += [(firsts[i] + step, step * columns + column) for step in steps]
            if lasts is not None and lasts[i] >= 0 and self.lens[i]:
                pairs.append((lasts[i], (self.lens[i] - 1) * columns + column))
        if not pairs:
            # All requests that drafted have left.
            return
        index = to_device(input_ids.device, torch.tensor(pairs).T.contiguous())
        input_ids[index[0]] = self.tokens.flatten()[index[1]]

    def deliver(self, tokens: torch.Tensor | None = None) -> dict[int, list[int]]:
        """Return the drafts of each request. tokens: these drafts on the CPU; None waits for the
        device."""
        columns = (self.tokens if tokens is None else tokens).T.tolist()
        return {
            i: tokens[: self.lens[i]]
            for i, tokens in zip(self.order, columns, strict=True)
            if i >= 0
        }
