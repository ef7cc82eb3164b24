"""Plugin that lets a CPU server work in overlapped rounds, as a GPU server does: rounds are
pre-launched before SGLang receives the tokens of the last one, and some take tokens without drafts.

A server that has this folder on PYTHONPATH loads it as an SGLang plugin. KVSPEC_AHEAD_SEED switches
it on, and decides how much every request drafts in each round.

A GPU runs these steps beside its main stream; here they run at once. Two faults of a GPU are
imitated. Window slots that such a round wrote for requests that have left become NaN when the main
stream next waits for the round. A new owner of the slot that did not wait answers nonsense. Logits
of a verification are overwritten once the next steps are enqueued, as both use the same memory.

/server_info counts the pre-launched rounds, and those that were extended before the tokens of the
last one were read.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang_kvspec.planning.round_plan import RoundBudget


def register() -> None:
    if "SGLANG_KVSPEC" not in os.environ or "KVSPEC_AHEAD_SEED" not in os.environ:
        return
    from sglang_kvspec.adapters.assembly import Captured, factories
    from sglang_kvspec.adapters.worker import KVSpecWorker
    from sglang_kvspec.engine.eager_verify import EagerVerify
    from sglang_kvspec.engine.overlap import OverlappedRounds

    counts: Counter[str] = Counter()
    sides: list[LateSide] = []

    def side(kv: Any) -> LateSide:
        sides.append(LateSide(kv))
        return sides[-1]

    def captured(parts: Any, most_piggyback: int, chosen: object) -> Captured:
        steps = ImmediateSteps(parts, sides)
        # A stand-in for VerifyGraphs.
        return Captured(steps, EagerVerify(SharedLogits(parts.forward, steps)))

    def scheduler(parts: Any, *_: object) -> AnyLengths:
        return AnyLengths(parts, int(os.environ["KVSPEC_AHEAD_SEED"]))

    def overlap(*arguments: Any) -> CountedOverlap:
        return CountedOverlap(OverlappedRounds(*arguments), counts)

    factories.side, factories.captured = side, captured
    factories.scheduler, factories.overlap = scheduler, overlap
    report = KVSpecWorker.kvspec_report
    KVSpecWorker.kvspec_report = lambda worker: report(worker) | {"ahead": dict(counts)}


class CountedOverlap:
    """Overlapped rounds, with a count of each round's outcome."""

    def __init__(self, inner: Any, counts: Counter[str]) -> None:
        self._inner, self._counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def take(self, batch: Any) -> Any:
        before = self._inner.ahead
        if before is not None:
            self._counts[_fate(before, batch.states)] += 1
            now = before.for_batch(batch.states)
            if before.plan is not None and now is not None:
                self._counts[_fate_of_plan(before.plan, now.plan)] += 1
                if now.plan is None or now.is_idle:
                    self._counts["planned again"] += 1
        return self._inner.take(batch)

    def interrupt(self) -> None:
        ahead = self._inner.ahead
        if ahead is not None and ahead.plan is not None:
            self._counts["planned again"] += 1
        self._inner.interrupt()

    def extend(self, batch: Any, started: Any) -> None:
        self._inner.extend(batch, started)
        if self._inner.ahead is not None:
            self._counts["went on"] += 1


class AnyLengths:
    """Stand-in for RoundScheduler. A third of the rounds have no drafts; in the others draft
    lengths, and the link's budget where residuals move, are random."""

    link_share = None
    piggybacks_sampled = False

    def __init__(self, parts: Any, seed: int) -> None:
        self._max_draft_len = parts.config.max_draft_len
        plan = parts.kv.plan
        self._cache_pages = plan.cache_pages if plan.host_pages else 0
        self._rng = random.Random(seed)

    def plan(
        self,
        states: Sequence[Any],
        late: Collection[int] = (),
        num_drafts: Sequence[int] | None = None,
    ) -> Any:
        from sglang_kvspec.engine.schedule import RoundSchedule

        rng = self._rng
        most = rng.choice((1, 4, self._max_draft_len))
        if rng.random() < 1 / 3:
            most = 0
        rooms = [max(state.cap_len(most) - len(state.drafts), 0) for state in states]
        pages = rng.randint(0, self._cache_pages)
        lens = [rng.randint(0, room) for room in rooms]
        return RoundSchedule(lens, RoundBudget(pages, 2 * pages))

    def piggybacks(self, state: Any, num_drafts: int) -> bool:
        return num_drafts < state.cap_len(self._max_draft_len) and self._rng.random() < 0.7

    def seconds_to_next(self, states: Sequence[Any], schedule: Any) -> list[float]:
        return [0.0] * len(states)


class LateSide:
    """Stand-in for SideStream, whose writes appear as late as they may."""

    def __init__(self, kv: Any) -> None:
        self._kv = kv
        # Window slots that the last round wrote to, and those of them that other pages have
        # acquired since.
        self._written: set[int] = set()
        self._taken_over: set[int] = set()
        slots = kv.window.slots
        acquire = slots.acquire

        def noted(page: int) -> int:
            slot: int = acquire(page)
            self._taken_over |= {slot} & self._written
            return slot

        slots.acquire = noted

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wrote(self, page: int) -> None:
        self._written.add(self._kv.window.slots.slot_of(page))

    def join(self) -> None:
        for slot in self._taken_over:
            for layer in range(self._kv.geometry.num_layers):
                for part in self._kv.window.layer(layer):
                    part[slot] = float("nan")
        self._written, self._taken_over = set(), set()


class SharedLogits:
    """Forward of a verification whose logits are in the memory that the next steps write to."""

    def __init__(self, forward: Any, steps: ImmediateSteps) -> None:
        self._forward, self._steps = forward, steps

    def run(self, batch: Any, rows: Mapping[int, Any], made: Any = None) -> torch.Tensor:
        self._steps.shared = self._forward.run(batch, rows, made)
        return self._steps.shared


class ImmediateSteps:
    """Stand-in for CudaGraphDrafter: the same calls and results, computed at once by eager
    forwards."""

    empty_step_s = empty_draft_step_s = 1e-3

    def __init__(self, parts: Any, sides: Sequence[LateSide]) -> None:
        from sglang_kvspec.engine.eager_drafter import EagerDrafter

        self._parts, self._sides = parts, sides
        self._eager = EagerDrafter(
            parts.forward, parts.sampler, parts.ranks, parts.kv.geometry.page_size, parts.view
        )
        # Logits of the last verification.
        self.shared = torch.empty(0)
        # State, pages and handle of each request that advanced last, in the order of the tokens'
        # columns, as batches change.
        self._advanced: list[tuple[Any, torch.Tensor, Any]] = []
        self._batch: Any = None
        # Drafts of the last round, in the memory that later steps write to.
        self._drafted = torch.empty(0, dtype=torch.int64)

    def draft(self, batch: Any, lens: Sequence[int]) -> Any:
        from sglang_kvspec.runtime.drafted_tokens import DraftedTokens

        self.shared.fill_(float("nan"))
        states, pages = batch.states, batch.pages
        order = sorted((i for i, n in enumerate(lens) if n), key=lambda i: -lens[i])
        # A request whose residuals are late has drafts already.
        starts = [state.next_position for state in states]
        if not all(states[i].is_greedy for i in order):
            self._eager.draft(batch, lens)
            self._note_writes(starts, pages, lens)
            return None
        shadows = [replace(s, drafts=list(s.drafts), draft_probs=[]) for s in states]
        self._eager.draft(replace(batch, states=shadows), lens)
        self._note_writes(starts, pages, lens)
        self._drafted = _columns([shadows[i].drafts[len(states[i].drafts) :] for i in order])
        return DraftedTokens(self._drafted, order, lens)

    def read_prompt_end(self, batch: Any) -> torch.Tensor:
        self.shared.fill_(float("nan"))
        self._drafted.fill_(-1)
        self._advanced = []
        return self._eager.read_prompt_end(batch)

    def advance(
        self, batch: Any, max_steps: int, skipped: Collection[int]
    ) -> tuple[Any, torch.Tensor]:
        from sglang_kvspec.runtime.drafted_tokens import DraftedTokens

        states, pages = batch.states, batch.pages
        size = self._parts.kv.geometry.page_size
        counts = [max(min(max_steps, state.remaining), 0) for state in states]
        counts = [0 if i in skipped else count for i, count in enumerate(counts)]
        if self._parts.kv.codec.target == "int8":
            room = [size - state.committed_len % size for state in states]
            counts = [min(pair) for pair in zip(counts, room, strict=True)]
        order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: -counts[i])
        shadows = [replace(state, drafts=[], draft_probs=[]) for state in states]
        self._batch = replace(batch, states=shadows)
        taken, logits = self._advance(counts, order)
        self._advanced = [(shadows[i], pages[i], batch.handles[i]) for i in order]
        return DraftedTokens(_columns([taken[i] for i in order]), order, counts), logits

    def advance_on(self, made: Any, steps: int) -> Any:
        from sglang_kvspec.runtime.drafted_tokens import DraftedTokens

        counts = [steps] * len(made.order)
        of_request = dict(zip(made.order, self._advanced, strict=True))
        parts = [of_request[i] for i in range(len(counts))]
        shadows, pages, handles = (list(column) for column in zip(*parts, strict=True))
        self._batch = replace(self._batch, states=shadows, pages=pages, handles=handles)
        taken, _ = self._advance(counts, made.order)
        return DraftedTokens(_columns([taken[i] for i in made.order]), made.order, counts)

    def _advance(
        self, counts: Sequence[int], order: Sequence[int]
    ) -> tuple[list[list[int]], torch.Tensor]:
        """Return the tokens that each request takes at once, and the logits of the last step.
        Advance the states of self._batch by these tokens."""
        from sglang_kvspec.kv.forward_plan import Row, RowKind

        self.shared.fill_(float("nan"))
        batch = self._batch
        size = self._parts.kv.geometry.page_size
        starts = [shadow.committed_len for shadow in batch.states]
        taken: list[list[int]] = [[] for _ in batch.states]
        logits = torch.empty(0)
        for step in range(max(counts)):
            rows = {}
            for i in sorted(i for i in order if counts[i] > step):
                start = batch.states[i].committed_len
                ids = batch.pages[i][: start // size + 1]
                assert len(ids) == start // size + 1, "beyond the pages of the round"
                rows[i] = Row(RowKind.VERIFY, start, 1, ids)
            logits = self._parts.forward.run(batch, rows)
            for i, row in zip(rows, logits, strict=True):
                taken[i].append(int(row.argmax()))
                batch.states[i].committed_len += 1
                batch.states[i].pending = taken[i][-1]
        self._note_writes(starts, batch.pages, counts)
        return taken, logits

    def _note_writes(
        self, starts: Sequence[int], pages: Sequence[torch.Tensor], lens: Sequence[int]
    ) -> None:
        size = self._parts.kv.geometry.page_size
        for start, ids, count in zip(starts, pages, lens, strict=True):
            for position in range(start, start + count):
                self._sides[-1].wrote(int(ids[position // size]))


def _fate(started: Any, states: Sequence[Any]) -> str:
    """Return "plain" or "drafted", and how the batch has changed since the round started."""
    before, now = [id(state) for state in started.states], [id(state) for state in states]
    stayed = [state for state in before if state in now]
    fate = "moved"
    if before == now:
        fate = "same"
    elif not stayed:
        fate = "left"
    elif stayed == before[: len(stayed)] == now[: len(stayed)]:
        fate = "grew" if len(now) > len(stayed) else "shrank"
    return f"{'plain' if started.is_plain else 'drafted'} {fate}"


def _fate_of_plan(before: Any, now: Any | None) -> str:
    if now is None:
        return "planned for those who left"
    gone = len(now.verify) < len(before.verify)
    return "planned for some who left" if gone else "planned"


def _columns(runs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return [steps, columns] int64, -1 past the end of a run."""
    longest = max(map(len, runs))
    return torch.tensor([[*run, *[-1] * (longest - len(run))] for run in runs]).T.contiguous()
