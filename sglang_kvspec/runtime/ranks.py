"""Ranks that serve one model together: rank 0 decides, and broadcasts its decisions.

Every rank holds some heads of every token and computes the same logits, from which each could
choose by itself. But kernels that sort and sum may round differently on two devices, and generators
and clocks are each rank's own. One token that differs between two ranks spoils the KV of both for
good. So rank 0's choices are sent to the others, in one small message for all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import torch
import torch.distributed as dist

from sglang_kvspec.core.errors import RanksDisagree
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.spec_sampler import VerifyResult

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_HEADER = 2


class Ranks:
    """This process among the `size` ranks that serve a model together; by default it is alone.

    on_cpu, on_device: process groups of these ranks for tensors in host memory and on the device.
    All ranks must make the same calls in the same order.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        on_cpu: ProcessGroup | None = None,
        on_device: ProcessGroup | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._on_cpu, self._on_device = on_cpu, on_device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def numbers(self, mine: Sequence[int], about: object) -> list[int]:
        """Return rank 0's integers, as many as this rank's own.

        about: the subject of these integers, equal on all ranks and printable. Raises RanksDisagree
        if the subject or the number of integers differs: ranks that serve different requests must
        stop.
        """
        if self.size == 1:
            return list(mine)
        header = [len(mine), crc32(repr(about).encode())]
        message = torch.tensor([*header, *mine], dtype=torch.int64)
        dist.broadcast(message, group=self._on_cpu, group_src=0)
        values = message.tolist()
        if values[:_HEADER] != header:
            raise RanksDisagree(
                f"rank {self.rank} of {self.size} is out of step with rank 0: it expected "
                f"{len(mine)} numbers about {about} and received {values[0]} about another subject"
            )
        return values[_HEADER:]

    def runs(
        self, mine: Sequence[Sequence[int]], most: Sequence[int], about: object
    ) -> list[list[int]]:
        """Return rank 0's runs of integers, as many as this rank's own. most: most integers of each
        run. Raises RanksDisagree like numbers()."""
        if self.size == 1:
            return [list(run) for run in mine]
        padded: list[int] = []
        for run, length in zip(mine, most, strict=True):
            assert len(run) <= length
            padded += [len(run), *run, *[0] * (length - len(run))]
        theirs = iter(self.numbers(padded, about))
        runs = []
        for length in most:
            num, *values = [next(theirs) for _ in range(length + 1)]
            runs.append(values[:num])
        return runs

    def least(self, mine: Sequence[int], about: object) -> list[int]:
        """Return the minimum over all ranks of each integer: what every rank has or measured at
        least. Every rank waits for the last one.

        about: subject and number of the integers, as for numbers(). Raises RanksDisagree if it is
        not equal on all ranks.
        """
        if self.size == 1:
            return list(mine)
        mark = crc32(repr(about).encode())
        # The minima of both signs are opposites only if the mark is equal on all ranks.
        message = torch.tensor([mark, -mark, *mine], dtype=torch.int64)
        dist.all_reduce(message, op=dist.ReduceOp.MIN, group=self._on_cpu)
        least, opposite, *values = message.tolist()
        if least != -opposite:
            raise RanksDisagree(
                f"rank {self.rank} of {self.size} is out of step with another rank: this rank sent "
                f"numbers about {about}, the other about another subject"
            )
        return values

    def gather(self, mine: Sequence[int], about: object) -> list[list[int]]:
        """Return the integers of every rank, by rank. Each rank passes equally many.

        about: subject and number of the integers, as for numbers(). Raises RanksDisagree if it is
        not equal on all ranks.
        """
        if self.size == 1:
            return [list(mine)]
        # Check the lengths first: all_gather cannot receive messages of other lengths.
        self.least([], about=(about, len(mine)))
        message = torch.tensor(mine, dtype=torch.int64)
        received = [torch.empty_like(message) for _ in range(self.size)]
        dist.all_gather(received, message, group=self._on_cpu)
        return [values.tolist() for values in received]

    def tensor(self, mine: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, of the shape of this rank's own, on the device. The CPU does not
        wait for it. The result may be `mine` itself, overwritten."""
        if self.size == 1:
            return mine
        values = mine.contiguous()
        dist.broadcast(values, group=self._on_device, group_src=0)
        return values


def broadcast_tokens(
    ranks: Ranks, states: Sequence[RequestState], chosen: Sequence[VerifyResult | None]
) -> list[VerifyResult | None]:
    """Replace the tokens that this rank chose for every request by those of rank 0.

    chosen: the result of a verification that is not committed yet; None where the request has
    drafted, whose last draft is replaced in `states`. Returns `chosen` with rank 0's tokens. Logits
    and draft distributions stay this rank's own: only those of rank 0 have an effect.
    """
    if ranks.size == 1:
        return list(chosen)
    pairs = list(zip(states, chosen, strict=True))
    runs = ranks.runs(
        [s.drafts[-1:] if verified is None else verified.tokens for s, verified in pairs],
        [1 if verified is None else len(s.drafts) + 1 for s, verified in pairs],
        about=[(s.rid, s.next_position) for s in states],
    )
    results: list[VerifyResult | None] = []
    for (state, verified), tokens in zip(pairs, runs, strict=True):
        if verified is None:
            state.drafts[-1:] = tokens
            results.append(None)
        else:
            results.append(verified._replace(tokens=tokens))
    return results


def broadcast_drafts(ranks: Ranks, states: Sequence[RequestState]) -> None:
    """Replace the last draft of every request by that of rank 0."""
    broadcast_tokens(ranks, states, [None] * len(states))


def broadcast_runs(
    ranks: Ranks, states: Sequence[RequestState], before: Sequence[int], most: Sequence[int]
) -> None:
    """Replace the drafts of every request from index `before` on by those of rank 0, which may be
    more or fewer. most: most drafts that any rank can have made."""
    if ranks.size == 1:
        return
    runs = ranks.runs(
        [state.drafts[start:] for state, start in zip(states, before, strict=True)],
        most,
        about=[(s.rid, s.committed_len, start) for s, start in zip(states, before, strict=True)],
    )
    for state, start, run in zip(states, before, runs, strict=True):
        state.drafts[start:] = run
        if state.draft_probs:
            # Only distributions of rank 0 have an effect, but each draft must have one.
            missing = len(state.drafts) - len(state.draft_probs)
            state.draft_probs += state.draft_probs[-1:] * missing
            del state.draft_probs[len(state.drafts) :]
