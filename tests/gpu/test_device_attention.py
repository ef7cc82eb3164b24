"""Tests of DeviceAttention over a GpuKVCache against ReferenceAttention over a ReferenceKVCache."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch

from kvspec_kernels.ops.attention_plan import Backend
from kvspec_kernels.ops.capture import captured_graph
from kvspec_kernels.reference.page_selection import page_mass, updated_mass
from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.seams import TARGET_ATTENTIONS
from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind, prefill_row
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.planning.capacity import CapacityPlan, PageBytes
from sglang_kvspec.runtime.budget_views import ScoredPages
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.device_pages import DevicePages
from sglang_kvspec.runtime.draft_rows import (
    DraftRow,
    DraftRows,
    draft_row,
    num_before_window,
    target_row,
)
from sglang_kvspec.runtime.draft_view import ViewShape
from sglang_kvspec.runtime.head_lists import HeadLists
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.reference_attention import ReferenceAttention
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.scored_tokens import ScoredPageLists, ScoredTokens
from sglang_kvspec.runtime.token_scorer import TokenScorer
from sglang_kvspec.runtime.wide_rows import WideRow, WideRows
from sglang_kvspec.scorers.base import Allocation
from sglang_kvspec.scorers.snapkv import SnapKV

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 2, 8, 2, 128, 64
NUM_PAGES, RECENT, MAX_STEPS = 100, 1, 8
SCALE = HEAD_DIM**-0.5
# Both sides round to bf16 (2^-9 relative). The GPU computes 8-bit pages in fp16 and drafts from
# codes with scales in fp16. A wrong page, slot or length gives errors of the order of 1.
TOLERANCE = 0.02


@pytest.fixture(autouse=True, params=["auto", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "kernels", request.param)


class Pair:
    """Both implementations with the same requests. Page ids are shuffled, so that a page id and its
    place in a request differ. kernels: of the GPU's cache, chosen by the fixture of that name."""

    kernels: Backend = "auto"

    def __init__(
        self, codec_name: str, target: str, *, in_order: bool = False, anchor_pages: int = NUM_PAGES
    ) -> None:
        geometry = KVGeometry(LAYERS, KV_HEADS, HEAD_DIM, PAGE, torch.bfloat16)
        codec = make_codec(
            codec_name, target=target, page_size=PAGE, head_dim=HEAD_DIM, dtype=torch.bfloat16
        )
        plan = CapacityPlan(
            num_pages=NUM_PAGES,
            window_pages=12,
            cache_pages=NUM_PAGES,
            host_pages=0,
            page_bytes=PageBytes(1, 1, 1),
            binding="test",
            pages_without_anchors=NUM_PAGES - anchor_pages,
        )
        self.reference = ReferenceAttention(
            ReferenceKVCache(geometry, codec, plan, torch.device("cpu"))
        )
        kv = GpuKVCache(geometry, codec, plan, torch.device("cuda:0"), kernels=self.kernels)
        make = TARGET_ATTENTIONS.load("deterministic" if in_order else target)
        self.device = DeviceAttention(kv, HEADS, make(kv, HEADS))
        self.keepers = (
            PageKeeper(self.reference.kv, RECENT),
            PageKeeper(self.device.kv, RECENT),
        )
        self.rng = torch.Generator().manual_seed(1)
        self.free = (torch.randperm(NUM_PAGES, generator=self.rng) + 1).tolist()
        self.pages: dict[str, list[int]] = {}
        self.committed: dict[str, int] = {}

    def page_ids(self, name: str, num_tokens: int) -> torch.Tensor:
        ids = self.pages.setdefault(name, [])
        while len(ids) * PAGE < num_tokens:
            ids.append(self.free.pop())
        return torch.tensor(ids[: -(-num_tokens // PAGE)])

    def draw(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        # Slices of one tensor, as a model's projection gives them.
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        both = torch.randn(num_tokens, width, generator=self.rng).bfloat16()
        sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        return tuple(part.unflatten(-1, (-1, HEAD_DIM)) for part in both.split(sizes, dim=-1))

    def forward(self, rows: dict[str, Row]) -> None:
        """Run a target forward on both, compare every layer, and commit all tokens."""
        plan = ForwardPlan(tuple(rows.values()))
        with self.reference.planned(plan), self.device.planned(plan):
            for layer in range(LAYERS):
                q, k, v = self.draw(plan.num_tokens)
                want = self.reference.forward(layer, q, k, v, SCALE)
                cuda = (part.cuda() for part in (q, k, v))
                assert_close(self.device.forward(layer, *cuda, SCALE), want)
        self.commit({name: row.end for name, row in rows.items()})

    def commit(self, ends: dict[str, int]) -> None:
        """Advance requests to these lengths, on both implementations."""
        for name, end in ends.items():
            for keeper in self.keepers:
                keeper.commit(self.page_ids(name, end), self.committed.get(name, 0), end)
            self.committed[name] = end
        for keeper in self.keepers:
            keeper.flush()
        for side in (self.reference, self.device):
            side.kv.check_integrity()

    def prefill(self, **lengths: int) -> None:
        rows = {}
        for name, length in lengths.items():
            start = self.committed.get(name, 0)
            ids = self.page_ids(name, start + length)
            rows[name] = prefill_row(start, length, ids, page_size=PAGE, recent_pages=RECENT)
        self.forward(rows)

    def verify(self, **lengths: int) -> None:
        rows = {}
        for name, length in lengths.items():
            start = self.committed[name]
            rows[name] = Row(RowKind.VERIFY, start, length, self.page_ids(name, start + length))
        self.forward(rows)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.cpu().float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)
    worst = float(error.max())
    assert worst < TOLERANCE, f"relative error {worst:.3g} at {int(error.argmax())}"


CODECS = pytest.mark.parametrize("codec", ["log4", "uniform4"])
# Also of a codec without the target int8.
DRAFTED = pytest.mark.parametrize("codec", ["log4", "uniform4", "turboquant"])


def drafting_pair(codec: str) -> Pair:
    """Return a pair for drafts, whose target needs no kernels of other packages."""
    has_int8 = codec != "turboquant"
    return Pair(codec, "int8" if has_int8 else "exact", in_order=not has_int8)


@CODECS
@pytest.mark.parametrize("target", ["exact", "int8", "in order"])
def test_prefill_and_verification(codec: str, target: str) -> None:
    if target == "exact":
        pytest.importorskip("flashinfer")
    in_order = target == "in order"
    pair = Pair(codec, "exact" if in_order else target, in_order=in_order)
    pair.prefill(a=200, b=64, c=1)
    # Second chunks begin within a page (a), at a page's start (b), and in the first page (c).
    pair.prefill(a=300, b=128, c=40)
    # a crosses a page's end, b starts a page, and c fills its first page exactly.
    pair.verify(a=20, b=5, c=23)
    pair.verify(a=1, b=1, c=1)
    pair.verify(b=65)


def test_more_parts_than_one_batch_of_the_int8_kernel() -> None:
    """Attend to 70 parts, which the kernel takes in batches of 64 and 6 in every layer."""
    pair = Pair("uniform4", "int8")
    pair.prefill(a=69 * PAGE + 7)
    pair.verify(a=3)


def head_lists() -> HeadLists:
    return HeadLists(LAYERS, KV_HEADS, torch.device("cuda"))


class Steps:
    """Four captured rows on a pair's device, compared with single rows of the reference."""

    def __init__(
        self,
        pair: Pair,
        make_attention: str,
        chosen: DevicePages | None = None,
        lists: HeadLists | None = None,
    ) -> None:
        """lists: those of rows that list pages by layer and KV head, without `chosen`."""
        self.pair, self.chosen = pair, chosen
        by_mass = chosen is not None
        if by_mass:
            lists = head_lists()
        sizes = (4, MAX_STEPS, NUM_PAGES, PAGE, pair.device.kv.device)
        self.rows = DraftRows(*sizes, lists=lists, by_mass=by_mass)
        self.attention = getattr(pair.device, make_attention)(self.rows, 4)
        self.inputs = [
            torch.empty(LAYERS, 4, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        self.outs = torch.empty_like(self.inputs[0])
        self.attention.plan([])
        pair.device.begin_steps(self.rows, self.attention)
        self.rows.load([])
        self._step()
        with captured_graph() as self.graph:
            self._step()
        pair.device.end_captured()

    def _step(self) -> None:
        self.rows.begin_step(4)
        for layer in range(LAYERS):
            q, k, v = (part[layer] for part in self.inputs)
            self.outs[layer] = self.pair.device.forward(layer, q, k, v, SCALE)
        self.rows.end_step(torch.zeros(4, 10, device="cuda"))

    def run(
        self,
        rows: list[DraftRow],
        kind: RowKind,
        lens: dict[str, int],
        seen: Mapping[str, torch.Tensor | None] = MappingProxyType({}),
    ) -> None:
        """Replay all steps of these rows, longest first, and compare. lens: number of steps by
        request. seen: pages that the reference reads, as Row has them."""
        pair = self.pair
        self.rows.load(rows)
        if self.chosen is not None:
            self.chosen.select(self.rows)
        self.attention.plan(rows)
        ids = {name: pair.page_ids(name, pair.committed[name] + n + 1) for name, n in lens.items()}
        for index in range(max(lens.values())):
            parts = pair.draw(4 * LAYERS)
            for place, part in zip(self.inputs, parts, strict=True):
                place.copy_(part.unflatten(0, (LAYERS, 4)))
            self.graph.replay()
            going = [name for name, n in lens.items() if n > index]
            plan = ForwardPlan(
                tuple(
                    Row(kind, pair.committed[n] + index, 1, ids[n], seen=seen.get(n)) for n in going
                )
            )
            with pair.reference.planned(plan):
                for layer in range(LAYERS):
                    q, k, v = (part[layer, : len(going)].cpu() for part in self.inputs)
                    want = pair.reference.forward(layer, q, k, v, SCALE)
                    assert_close(self.outs[layer, : len(going)], want)
        assert self.rows.step.item() == max(lens.values())
        assert self.rows.tail_lens.tolist()[3] == 0


@DRAFTED
def test_draft_steps_in_a_graph(codec: str) -> None:
    """Compare steps of one CUDA graph, with fewer requests than rows, with single draft rows."""
    pair = drafting_pair(codec)
    pair.prefill(a=190, b=500, c=3)
    steps = Steps(pair, "make_draft_step")
    # a crosses into the next page, which is opened for the steps.
    lens = {"b": 6, "a": 5, "c": 2}
    ids = {name: pair.page_ids(name, pair.committed[name] + n + 1) for name, n in lens.items()}
    kv = pair.device.kv
    rows = [draft_row(kv, 0, pair.committed[name], ids[name], n) for name, n in lens.items()]
    steps.run(rows, RowKind.DRAFT, lens)


class Scored:
    """The scorer of a pair's device, and the mass that it should find."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.view = ScoredPages(KVSpecConfig(), ViewShape(LAYERS, KV_HEADS, 0, PAGE))
        queries = pair.device.keep_queries(self.view.num_queries, 4, MAX_STEPS)
        self.chosen = DevicePages(pair.device.kv, queries, self.view, 4, 6, NUM_PAGES)
        self.queries = pair.reference.keep_queries(self.view.num_queries)
        self.states: dict[str, RequestState] = {}

    def score(self, *names: str) -> None:
        """Score the requests of the newest forward, in this order, and compare the mass."""
        pair, committed = self.pair, []
        for index, name in enumerate(names):
            end, slot = pair.committed[name], 5 - "abcd".index(name)
            fresh = RequestState(name, end, 0, [], SamplingParams(), 9, budget=0.1, slot=slot)
            state = self.states.setdefault(name, fresh)
            state.committed_len = end
            committed.append((index, state, pair.page_ids(name, end)))
        self.chosen.score(committed)
        for index, state, pages in committed:
            if not state.num_scored:
                continue
            q = self.queries.before(index, state.committed_len)
            past = pages[: state.num_scored]
            new = torch.stack(
                [
                    page_mass(q[layer].float(), k.flatten(0, 1), PAGE, 1.0)
                    for layer in range(LAYERS)
                    for k, _ in [pair.reference.kv.read_draft(layer, past)]
                ]
            )
            most = self.view.num_queries
            state.page_mass = updated_mass(state.page_mass, new, len(q[0]), most)
            found = self.chosen._selection.mass[:, state.slot, :, : state.num_scored].cpu()
            torch.testing.assert_close(found, state.page_mass, atol=1e-4, rtol=0.05)
            # From here on, both sides choose by the same numbers.
            state.page_mass = found


@DRAFTED
def test_draft_steps_read_the_pages_of_the_largest_mass(codec: str) -> None:
    pair = drafting_pair(codec)
    scored = Scored(pair)
    kv = pair.device.kv
    pair.prefill(a=1190, b=2500, c=3)
    scored.score("a", "b", "c")
    # Their few queries change the mass by a share. c is not verified.
    pair.verify(b=3, a=1)
    scored.score("b", "a")
    steps = Steps(pair, "make_draft_step", scored.chosen)
    lens = {"b": 6, "a": 5, "c": 2}
    rows, seen, num_read = [], {}, {}
    for name, count in lens.items():
        start, state = pair.committed[name], scored.states[name]
        ids = pair.page_ids(name, start + count + 1)
        seen[name] = scored.view.select(state, start // PAGE)
        counts = scored.chosen.counts(state, start // PAGE)
        rows.append(draft_row(kv, 0, start, ids, count, counts=counts, slot=state.slot))
        num_read[name] = rows[-1].num_listed
    assert num_read == {"b": 6, "a": 4, "c": 0}
    steps.run(rows, RowKind.DRAFT, lens, seen)


@CODECS
@pytest.mark.parametrize("allocation", ["head", "model"])
def test_draft_steps_read_the_pages_of_the_best_scores(codec: str, allocation: Allocation) -> None:
    """Score prompts on both sides, and compare steps over lists of pages, with `model` of different
    lengths, with rows that mask tokens."""
    pytest.importorskip("flashinfer")
    pair = Pair(codec, "exact")
    sides = (pair.reference, pair.device)
    scorers = []
    for side in sides:
        scorers.append(TokenScorer(side.kv, SnapKV(window=16), None, 0))
        side.show(scorers[-1])
    # The second chunk of b is scored by keys that the device reads from residuals.
    pair.prefill(a=1190, b=1500, c=3)
    pair.prefill(b=1000)
    lens = {"b": 6, "a": 5, "c": 2}
    rows, seen, head = [], {}, head_lists()
    for slot, (name, count) in enumerate(lens.items()):
        start = pair.committed[name]
        ids = pair.page_ids(name, start + count + 1)
        states = [
            RequestState(name, start, 0, [], SamplingParams(), 9, budget=0.1) for _ in scorers
        ]
        for scorer, state in zip(scorers, states, strict=True):
            scorer.score([(0, state, ids)])
        want, found = (state.token_scores.scores for state in states)
        torch.testing.assert_close(found, want, atol=1e-4, rtol=0.05)
        # From here on, both sides choose by the same numbers.
        lists = ScoredPageLists(allocation, PAGE).select(states[1], start // PAGE)
        mask = ScoredTokens(allocation, PAGE, by_tokens=False)
        seen[name] = mask.select(states[1], start // PAGE)
        # A GPU reads all pages of the recent window.
        begin = num_before_window(pair.device.kv, start, ids)
        seen[name][..., begin * PAGE :] = True
        chosen = {"seen": lists, "slot": slot, "lists": head}
        rows.append(draft_row(pair.device.kv, 0, start, ids, count, **chosen))
        again = draft_row(pair.device.kv, 0, start, ids, count, **chosen)
        assert again.past is rows[-1].past, "a round of the same page lists it again"
    has_shorter = bool((rows[0].past < 0).any())
    assert has_shorter == (allocation == "model")
    steps = Steps(pair, "make_draft_step", lists=head)
    steps.run(rows, RowKind.DRAFT, lens, seen)


@CODECS
def test_draft_steps_leave_pages_without_anchors_out(codec: str) -> None:
    """Pages get the places of others, also pages that a captured graph encodes."""
    pytest.importorskip("flashinfer")
    pair = Pair(codec, "exact", anchor_pages=60)
    sides = (pair.reference.kv, pair.device.kv)
    pair.prefill(a=1190, b=1500)
    gone = pair.page_ids("a", 1190)[[0, 3, 4, 9]].tolist() + pair.page_ids("b", 1500)[2:9].tolist()
    for kv in sides:
        kv.free_anchors(gone)
    pair.device.kv.capture_commits()
    pair.prefill(c=700, b=64)
    for _ in range(9):
        pair.verify(a=16, c=9)
    every = torch.cat([pair.page_ids(name, end) for name, end in pair.committed.items()])
    places = pair.device.kv.anchor_places
    held = every[places.have(every)]
    assert len(held) < len(every)
    assert (places.of(held) != held).any(), "all pages have their own places"
    lens = {"b": 6, "a": 5, "c": 2}
    rows = [
        draft_row(pair.device.kv, 0, start, pair.page_ids(name, start + count + 1), count)
        for name, count in lens.items()
        for start in [pair.committed[name]]
    ]
    Steps(pair, "make_draft_step").run(rows, RowKind.DRAFT, lens)
    for kv in sides:
        kv.check_integrity()


class WideSteps:
    """Captured steps of num_rows tokens of up to four requests, on a pair's device."""

    def __init__(self, pair: Pair, num_rows: int, chosen: DevicePages | None = None) -> None:
        self.pair, self.num_rows, self.chosen = pair, num_rows, chosen
        by_mass = chosen is not None
        lists = head_lists() if by_mass else None
        sizes = (4, MAX_STEPS, NUM_PAGES, PAGE, pair.device.kv.device)
        self.drafts = DraftRows(*sizes, lists=lists, by_mass=by_mass)
        self.rows = WideRows(self.drafts, 4 * num_rows)
        self.attention = pair.device.make_draft_step(self.drafts, 4, num_rows)
        self.inputs = [
            torch.empty(LAYERS, 4 * num_rows, n, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            for n in (HEADS, KV_HEADS, KV_HEADS)
        ]
        self.outs = torch.empty_like(self.inputs[0])
        pair.device.begin_wide_steps(self.rows, self.attention, num_rows)
        self.rows.clear()
        self._step()
        with captured_graph() as self.graph:
            self._step()
        pair.device.end_captured()

    def _step(self) -> None:
        num_tokens = 4 * self.num_rows
        self.rows.begin_step(num_tokens)
        for layer in range(LAYERS):
            q, k, v = (part[layer] for part in self.inputs)
            self.outs[layer] = self.pair.device.forward(layer, q, k, v, SCALE)
        self.rows.end_step(torch.zeros(num_tokens, 10, device="cuda"))

    def load(self, rows: list[DraftRow]) -> None:
        self.drafts.load(rows)
        if self.chosen is not None:
            self.chosen.select(self.drafts)

    def replay(self, rows: list[WideRow]) -> list[range]:
        """Run a step over drawn values. Return the places of each request's tokens."""
        for place, part in zip(
            self.inputs, self.pair.draw(4 * self.num_rows * LAYERS), strict=True
        ):
            place.copy_(part.unflatten(0, (LAYERS, 4 * self.num_rows)))
        self.rows.load(rows, self.num_rows)
        self.graph.replay()
        ends = [self.num_rows * (b + 1) for b in range(len(rows))]
        return [range(end - len(row.tokens), end) for end, row in zip(ends, rows, strict=True)]


@DRAFTED
@pytest.mark.parametrize("num_rows", [4, 16])
def test_wide_steps_in_a_graph(codec: str, num_rows: int) -> None:
    """Compare steps with several tokens of a request with draft rows of the reference. The second
    step overwrites tokens that the first one wrote in vain."""
    pair = drafting_pair(codec)
    pair.prefill(a=190, b=500, c=3)
    wide = WideSteps(pair, num_rows)
    kv = pair.device.kv
    # a crosses into the next page.
    lens = {"b": 5, "a": 6, "c": 3}
    ids = {name: pair.page_ids(name, pair.committed[name] + n + 1) for name, n in lens.items()}
    rows = {name: draft_row(kv, 0, pair.committed[name], ids[name], n) for name, n in lens.items()}
    wide.load(list(rows.values()))
    # Of each request, the tokens that have KV, and how many follow.
    for step in ({"b": (0, 2), "a": (0, 4), "c": (0, 3)}, {"b": (2, 1), "a": (1, 4), "c": (3, 0)}):
        taken = [WideRow(rows[name], done, [7] * n) for name, (done, n) in step.items()]
        index = [at for places in wide.replay(taken) for at in places]
        plan = ForwardPlan(
            tuple(
                Row(
                    RowKind.DRAFT,
                    pair.committed[name] + done,
                    n,
                    ids[name],
                    proposed=(7,) * (n - 1),
                )
                for name, (done, n) in step.items()
                if n
            )
        )
        with pair.reference.planned(plan):
            for layer in range(LAYERS):
                q, k, v = (part[layer, index].cpu() for part in wide.inputs)
                want = pair.reference.forward(layer, q, k, v, SCALE)
                assert_close(wide.outs[layer, index], want)


@DRAFTED
@pytest.mark.parametrize("num_rows", [4, 16])
@pytest.mark.parametrize("by_mass", [False, True], ids=["all", "pages"])
def test_a_wide_step_attends_as_steps_of_one_token(
    codec: str, num_rows: int, by_mass: bool
) -> None:
    pair = drafting_pair(codec)
    scored = Scored(pair) if by_mass else None
    pair.prefill(a=1190, b=2500, c=3)
    if scored is not None:
        scored.score("a", "b", "c")
    chosen = None if scored is None else scored.chosen
    kv, count = pair.device.kv, min(num_rows, MAX_STEPS)
    rows = []
    for name in ("b", "a", "c"):
        start = pair.committed[name]
        ids = pair.page_ids(name, start + count + 1)
        selected = {}
        if scored is not None:
            state = scored.states[name]
            counts = scored.chosen.counts(state, start // PAGE)
            selected = {"counts": counts, "slot": state.slot}
        rows.append(draft_row(kv, 0, start, ids, count, **selected))
    wide = WideSteps(pair, num_rows, chosen)
    wide.load(rows)
    places = wide.replay([WideRow(row, 0, [7] * count) for row in rows])
    steps = Steps(pair, "make_draft_step", chosen)
    steps.rows.load(rows)
    if chosen is not None:
        chosen.select(steps.rows)
    for token in range(count):
        index = [each[token] for each in places]
        for place, part in zip(steps.inputs, wide.inputs, strict=True):
            place.zero_()
            place[:, : len(rows)] = part[:, index]
        steps.graph.replay()
        for layer in range(LAYERS):
            assert_close(wide.outs[layer, index], steps.outs[layer, : len(rows)].cpu())


@CODECS
@pytest.mark.parametrize(
    ("target", "kind", "in_order"),
    [
        ("exact", "target", False),
        ("exact", "short_target", False),
        ("int8", "target", False),
        ("exact", "target", True),
    ],
)
def test_target_steps_in_a_graph(codec: str, target: str, kind: str, in_order: bool) -> None:
    """Compare rounds without drafts, which cross page ends, with single rows, and verify
    afterwards."""
    pair = Pair(codec, target, in_order=in_order)
    pair.prefill(a=190, b=500, c=3)
    steps = Steps(pair, f"make_{kind}_step")
    kv = pair.device.kv
    kv.capture_commits()
    for wanted in ({"b": 6, "a": 5, "c": 2}, {"c": 8, "a": 8, "b": 7}, {"a": 1}):
        room = {name: PAGE - pair.committed[name] % PAGE for name in wanted}
        lens = {n: min(w, room[n]) if target == "int8" else w for n, w in wanted.items()}
        lens = dict(sorted(lens.items(), key=lambda item: -item[1]))
        rows = [
            target_row(kv, 0, pair.committed[n], pair.page_ids(n, pair.committed[n] + w), w)
            for n, w in lens.items()
        ]
        steps.run(rows, RowKind.VERIFY, lens)
        pair.commit({name: pair.committed[name] + n for name, n in lens.items()})
    pair.verify(a=3, b=9, c=2)


def test_deterministic_prefill_verification_and_steps_give_the_same_bits() -> None:
    """Compute the tokens of one request in one chunk, in two chunks, in a verification over a
    page's end, and one by one from a CUDA graph."""
    start, end, size = 2 * PAGE + 30, 3 * PAGE + 5, PAGE
    whole, parts = (Pair("uniform4", "exact", in_order=True) for _ in range(2))
    kv = parts.device.kv
    kv.capture_commits()
    drawn = [whole.draw(end) for _ in range(LAYERS)]

    def forward(pair: Pair, row: Row) -> list[torch.Tensor]:
        span = slice(row.start, row.start + row.length)
        with pair.device.planned(ForwardPlan((row,))):
            return [
                pair.device.forward(layer, *(part[span].cuda() for part in drawn[layer]), SCALE)
                for layer in range(LAYERS)
            ]

    def chunk(pair: Pair, start: int, end: int) -> list[torch.Tensor]:
        ids = pair.page_ids("a", end)
        row = prefill_row(start, end - start, ids, page_size=size, recent_pages=RECENT)
        return forward(pair, row)

    want = chunk(whole, 0, end)
    for first, last in ((0, PAGE + 7), (PAGE + 7, start)):
        for out, expected in zip(chunk(parts, first, last), want, strict=True):
            assert torch.equal(out, expected[first:last])
        parts.keepers[1].commit(parts.page_ids("a", last), first, last)
        parts.keepers[1].flush()
    verified = forward(parts, Row(RowKind.VERIFY, start, end - start, parts.page_ids("a", end)))
    for out, expected in zip(verified, want, strict=True):
        assert torch.equal(out, expected[start:])
    # The verified tokens are rejected and computed again, one by one.
    rows = DraftRows(4, end - start, NUM_PAGES, PAGE, kv.device)
    steps = parts.device.make_target_step(rows, 4)
    inputs = [torch.zeros(LAYERS, 4, *part.shape[1:]).bfloat16().cuda() for part in drawn[0]]
    outs = torch.empty_like(inputs[0])

    def step() -> None:
        rows.begin_step(4)
        for layer in range(LAYERS):
            outs[layer] = parts.device.forward(layer, *(part[layer] for part in inputs), SCALE)
        rows.end_step(torch.zeros(4, 10, device="cuda"))

    rows.load([])
    parts.device.begin_steps(rows, steps)
    step()
    with captured_graph() as graph:
        step()
    parts.device.end_captured()
    for first, last in ((start, 3 * PAGE), (3 * PAGE, end)):
        loaded = [target_row(kv, 0, first, parts.page_ids("a", last + 1), last - first)]
        rows.load(loaded)
        steps.plan(loaded)
        for position in range(first, last):
            for index, place in enumerate(inputs):
                for layer in range(LAYERS):
                    place[layer, 0] = drawn[layer][index][position].cuda()
            graph.replay()
            for layer in range(LAYERS):
                assert torch.equal(outs[layer, 0], want[layer][position])
        parts.keepers[1].commit(parts.page_ids("a", last), first, last)
        parts.keepers[1].flush()
