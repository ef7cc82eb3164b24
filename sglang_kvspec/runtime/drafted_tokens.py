"""Tokens that a device has made and the CPU has not seen yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_kvspec.kv.transfers import to_device


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Drafts that are still only on the device: what verifying them needs can be enqueued before
    anyone waits for them.

    tokens: [steps, columns] int64; column c belongs to request order[c], which has lens[order[c]].
    A request that has left is -1.
    """

    tokens: torch.Tensor
    order: Sequence[int]
    lens: Sequence[int]

    @classmethod
    def of_one_step(
        cls, tokens: torch.Tensor, order: Sequence[int], num_requests: int
    ) -> DraftedTokens:
        """tokens [1, columns]: one draft of each request in `order`, of so many."""
        lens = [0] * num_requests
        for i in order:
            lens[i] = 1
        return cls(tokens, order, lens)

    def rearranged(self, places: Mapping[int, int], lens: Sequence[int]) -> DraftedTokens:
        """For a batch where request i is places[i], or is no longer, and has the given lens."""
        return DraftedTokens(self.tokens, [places.get(i, -1) for i in self.order], lens)

    def place(
        self, input_ids: torch.Tensor, firsts: Sequence[int], lasts: Sequence[int] | None = None
    ) -> None:
        """Write the drafts of request i into input_ids [num_tokens] from firsts[i] on, where that
        is not -1: it verifies. lasts: where its last draft goes, from which it drafts on, or -1."""
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
        """What every request got. tokens: where the CPU has them already; otherwise this waits for
        the device."""
        columns = (self.tokens if tokens is None else tokens).T.tolist()
        return {
            i: tokens[: self.lens[i]]
            for i, tokens in zip(self.order, columns, strict=True)
            if i >= 0
        }
