"""Lets a CPU server work in rounds as a GPU does: rounds begun before SGLang hears of the last one,
and tokens taken without drafting.

A server that has this folder on PYTHONPATH loads it as an SGLang plugin. KVSPEC_AHEAD_SEED switches
it on and decides, round after round, how much every request drafts. What a GPU runs beside its main
stream is done at once here, with one thing as late as it may be: what such a round wrote for
requests that have left appears when the main stream next waits for it, as NaN, so that whoever took
over their memory without waiting answers nonsense. So does whoever reads logits of a verification
once the next steps are enqueued, which leave theirs in the same place. /server_info counts the
rounds begun ahead, and those that went on before the last one's tokens were read.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from sglang_kvspec.planning.round_step import RoundBudget


def register() -> None:
    if "SGLANG_KVSPEC" not in os.environ or "KVSPEC_AHEAD_SEED" not in os.environ:
        return
    from sglang_kvspec.adapters.round_worker import RoundWorker
    from sglang_kvspec.runtime.round_stepper import RoundStepper
    from sglang_kvspec.runtime.started_round import StartedRound

    report, for_batch = RoundWorker.kvspec_report, StartedRound.for_batch
    counts: Counter[str] = Counter()
    init_cuda_graphs, iterate = RoundWorker.init_cuda_graphs, RoundWorker._iterate
    go_on, take_back = RoundWorker._go_on, RoundStepper.take_back

    def init(worker: Any) -> None:
        init_cuda_graphs(worker)
        worker._side = LateSide(worker.kv)
        worker._graphs = ImmediateStepper(worker)
        worker._holds_all = not worker.kv.plan.host_pages
        worker._lengths = AnyLengths(worker, int(os.environ["KVSPEC_AHEAD_SEED"]))

    def iterate_with_batch(worker: Any, batch: Any) -> Any:
        worker._graphs.begin(batch)
        return iterate(worker, batch)

    def counted(started: Any, states: Sequence[Any]) -> Any:
        counts[_fate(started, states)] += 1
        now = for_batch(started, states)
        if started.plan is not None and now is not None:
            counts[_fate_of_plan(started.plan, now.plan)] += 1
        return now

    def taken_back(stepper: Any) -> None:
        counts["planned again"] += 1
        take_back(stepper)

    def going_on(worker: Any, *arguments: Any) -> Any:
        started = go_on(worker, *arguments)
        counts["went on"] += started is not None
        return started

    StartedRound.for_batch = counted
    RoundStepper.take_back = taken_back
    RoundWorker._go_on = going_on
    RoundWorker.kvspec_report = lambda worker: report(worker) | {"ahead": dict(counts)}
    RoundWorker.init_cuda_graphs = init
    RoundWorker._iterate = iterate_with_batch


class AnyLengths:
    """In place of RoundLengths: a third of the rounds without drafts, and the others as uneven as
    they may be. Where residuals move, so is what the link has time for."""

    link_share = None

    def __init__(self, worker: Any, seed: int) -> None:
        self._max_draft_len = worker.config.max_draft_len
        self._cache_pages = worker.kv.plan.cache_pages if worker.kv.plan.host_pages else 0
        self._rng = random.Random(seed)

    def plan(
        self,
        states: Sequence[Any],
        late: Collection[int] = (),
        num_drafts: Sequence[int] | None = None,
    ) -> tuple[list[int], RoundBudget]:
        rng = self._rng
        most = rng.choice((1, 4, self._max_draft_len))
        if rng.random() < 1 / 3:
            most = 0
        rooms = [max(state.cap_len(most) - len(state.drafts), 0) for state in states]
        pages = rng.randint(0, self._cache_pages)
        return [rng.randint(0, room) for room in rooms], RoundBudget(pages, 2 * pages)

    def pays(self, state: Any, num_drafts: int) -> bool:
        return num_drafts < state.cap_len(self._max_draft_len) and self._rng.random() < 0.7


class LateSide:
    """In place of SideStream."""

    def __init__(self, kv: Any) -> None:
        self._kv = kv
        # Window slots that the last round wrote to, and those of them that others have by now.
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


class ImmediateStepper:
    """In place of GraphStepper: the same calls and results, from the worker's own forwards."""

    empty_step_s = 1e-3

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        # Logits of the last verification.
        self._shared = torch.empty(0)
        self._verify_rows = worker._verify_rows
        worker._verify_rows = self._verify_into_shared
        self.batch: Any = None
        self._fields: dict[str, Any] = {}
        # Where those who advanced last are by now, and their pages; in the order of the tokens'
        # columns, as batches change.
        self._advanced: list[tuple[Any, torch.Tensor]] = []
        # Drafts of the last round, which lie where steps leave theirs.
        self._drafted = torch.empty(0, dtype=torch.int64)

    def begin(self, batch: Any) -> None:
        """An iteration. A verification of some of its requests leaves only those in the batch."""
        self.batch = batch
        self._fields = {name: getattr(batch, name) for name in self._worker.FORWARD_FIELDS}

    def _verify_into_shared(self, *arguments: Any) -> Any:
        output, beside = self._verify_rows(*arguments)
        self._shared = output.next_token_logits
        return output, beside

    @contextmanager
    def _whole_batch(self) -> Iterator[None]:
        left = {name: getattr(self.batch, name) for name in self._fields}
        for name, value in self._fields.items():
            setattr(self.batch, name, value)
        yield
        for name, value in left.items():
            setattr(self.batch, name, value)

    def draft(
        self, batch: Any, states: Sequence[Any], pages: Sequence[torch.Tensor], lens: Sequence[int]
    ) -> Any:
        from sglang_kvspec.adapters.drafters import EagerDrafter
        from sglang_kvspec.adapters.requests import takes_argmax
        from sglang_kvspec.runtime.drafted_tokens import DraftedTokens

        self._shared.fill_(float("nan"))
        order = sorted((i for i, n in enumerate(lens) if n), key=lambda i: -lens[i])
        eager = EagerDrafter(self._worker)
        # A request whose residuals are late has drafts already.
        starts = [state.next_position for state in states]
        if not all(takes_argmax(batch.reqs[i], states[i]) for i in order):
            eager.draft(batch, states, pages, lens)
            self._note_writes(starts, pages, lens)
            return None
        # The worker notes the drafts of a round itself.
        apart = {"rid": "", "draft_probs": [], "timeline": None, "room": None}
        shadows = [replace(s, drafts=list(s.drafts), **apart) for s in states]
        with self._whole_batch():
            eager.draft(batch, shadows, pages, lens)
        self._note_writes(starts, pages, lens)
        self._drafted = _columns([shadows[i].drafts[len(states[i].drafts) :] for i in order])
        return DraftedTokens(self._drafted, order, lens)

    def read_prompt_end(self, batch: Any, state: Any, pages: torch.Tensor) -> torch.Tensor:
        from sglang_kvspec.adapters.drafters import EagerDrafter

        self._shared.fill_(float("nan"))
        self._drafted.fill_(-1)
        self._advanced = []
        return EagerDrafter(self._worker).read_prompt_end(batch, state, pages)

    def advance(
        self,
        states: Sequence[Any],
        pages: Sequence[torch.Tensor],
        max_steps: int,
        late: Collection[int] = (),
    ) -> tuple[Any, torch.Tensor]:
        from sglang_kvspec.runtime.drafted_tokens import DraftedTokens

        worker = self._worker
        size = worker.kv.geometry.page_size
        counts = [max(min(max_steps, state.remaining), 0) for state in states]
        counts = [0 if i in late else count for i, count in enumerate(counts)]
        if worker.kv.codec.target == "int8":
            room = [size - state.committed_len % size for state in states]
            counts = [min(pair) for pair in zip(counts, room, strict=True)]
        order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: -counts[i])
        shadows = [replace(state, drafts=[], draft_probs=[]) for state in states]
        taken, logits = self._advance(shadows, pages, counts, order)
        self._advanced = [(shadows[i], pages[i]) for i in order]
        return DraftedTokens(_columns([taken[i] for i in order]), order, counts), logits

    def advance_on(self, made: Any, steps: int) -> Any:
        from sglang_kvspec.runtime.drafted_tokens import DraftedTokens

        counts = [steps] * len(made.order)
        of_request = dict(zip(made.order, self._advanced, strict=True))
        shadows, pages = zip(*(of_request[i] for i in range(len(counts))), strict=True)
        taken, _ = self._advance(shadows, pages, counts, made.order)
        return DraftedTokens(_columns([taken[i] for i in made.order]), made.order, counts)

    def _advance(
        self,
        shadows: Sequence[Any],
        pages: Sequence[torch.Tensor],
        counts: Sequence[int],
        order: Sequence[int],
    ) -> tuple[list[list[int]], torch.Tensor]:
        """Tokens that each request takes at once, and the logits of the last step. shadows[i]:
        request i, goes on with it."""
        from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind

        self._shared.fill_(float("nan"))
        worker, batch = self._worker, self.batch
        size = worker.kv.geometry.page_size
        starts = [shadow.committed_len for shadow in shadows]
        taken: list[list[int]] = [[] for _ in shadows]
        logits = torch.empty(0)
        for step in range(max(counts)):
            rows = {}
            for i in sorted(i for i in order if counts[i] > step):
                start = shadows[i].committed_len
                ids = pages[i][: start // size + 1]
                assert len(ids) == start // size + 1, "beyond the pages of the round"
                rows[i] = Row(RowKind.VERIFY, start, 1, ids)
            with self._whole_batch():
                result = worker._forward(
                    ForwardPlan(tuple(rows.values())),
                    forward_batch=worker._ragged_batch(batch, shadows, rows),
                )
            logits = result.logits_output.next_token_logits
            for i, row in zip(rows, logits, strict=True):
                taken[i].append(int(row.argmax()))
                shadows[i].committed_len += 1
                shadows[i].pending = taken[i][-1]
        self._note_writes(starts, pages, counts)
        return taken, logits

    def _note_writes(
        self, starts: Sequence[int], pages: Sequence[torch.Tensor], lens: Sequence[int]
    ) -> None:
        size = self._worker.kv.geometry.page_size
        for start, ids, count in zip(starts, pages, lens, strict=True):
            for position in range(start, start + count):
                self._worker._side.wrote(int(ids[position // size]))


def _fate(started: Any, states: Sequence[Any]) -> str:
    """drafted or plain, and what became of its batch meanwhile."""
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
    """[steps, columns] int64, -1 past the end of a run."""
    longest = max(map(len, runs))
    return torch.tensor([[*run, *[-1] * (longest - len(run))] for run in runs]).T.contiguous()
