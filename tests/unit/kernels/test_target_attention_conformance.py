"""Conformance tests of any target attention. Another package can run this file with its own in
IMPLEMENTATIONS.

On a CPU they run in Triton's interpreter, with a stand-in for FlashInfer; on a GPU from CUDA
graphs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from kvspec_testkit.runtime import paged_prefill
from kvspec_testkit.runtime.attention_pair import AttentionPair
from kvspec_testkit.runtime.captured_steps import CapturedSteps
from kvspec_testkit.runtime.captured_verification import CapturedVerification
from sglang_kvspec.core.config import Target
from sglang_kvspec.core.seams import TARGET_ATTENTIONS
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize

PLUGINS = Path(__file__).parents[2] / "plugins"
PAGE, NUM_PAGES, MAX_TOKENS, MAX_ROWS = 64, 12, 16, 3
# Both sides round to bf16 (2^-9 relative). The GPU computes 8-bit pages in fp16. A wrong page, slot
# or length gives errors of the order of 1.
TOLERANCE = 0.02


def toy_attention():
    spec = importlib.util.spec_from_file_location("toy_attention", PLUGINS / "toy_attention.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PlainTorchAttention


TOY = toy_attention()
IMPLEMENTATIONS = {
    **{name: TARGET_ATTENTIONS.load(name) for name in TARGET_ATTENTIONS.built_in},
    "toy": TOY,
}
every_attention = pytest.mark.parametrize(
    "implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS
)


@pytest.fixture
def make_pair(monkeypatch, device):
    if device.type == "cpu":
        monkeypatch.setitem(sys.modules, "flashinfer", paged_prefill)

    def make(implementation, num_layers=1):
        if device.type == "cuda" and implementation is TOY:
            pytest.skip("reads indices on the CPU, which no graph can hold")
        # A small size for the interpreter, and on a GPU a size that FlashInfer has.
        head_dim = 32 if device.type == "cpu" else 128
        return AttentionPair(
            "uniform4",
            implementation.target,
            KVGeometry(num_layers, 1, head_dim, PAGE, torch.bfloat16),
            device,
            num_qo_heads=2,
            num_pages=NUM_PAGES,
            cache_pages=NUM_PAGES,
            tolerance=TOLERANCE,
            attention=implementation,
        )

    return make


def steps_of(pair, batch, make="make_target_step"):
    return CapturedSteps(pair, batch, getattr(pair.attention, make), max_pages=NUM_PAGES)


def verifications_of(pair, *sizes):
    """Return captured verifications of these sizes over one VerifyRows."""
    splits = pair.attention.splits_by_page
    rows = VerifyRows(
        MAX_TOKENS,
        MAX_ROWS,
        2 * MAX_ROWS if splits else MAX_TOKENS,
        max_pages=NUM_PAGES,
        max_past=2 * NUM_PAGES,
        max_tail=2 * MAX_ROWS,
        max_encoded=MAX_ROWS if splits else 0,
        page_size=PAGE,
        device=pair.kv.device,
    )
    made = pair.attention.make_verifications(rows)
    return [CapturedVerification(pair, rows, made.make(size), size) for size in sizes]


@every_attention
def test_declarations(make_pair, implementation):
    assert implementation.target in get_args(Target)
    for name in ("is_deterministic", "splits_by_page", "short_steps_differ"):
        assert isinstance(getattr(implementation, name), bool)
    attention = make_pair(implementation).attention
    tiles = attention._target.query_tiles
    assert all(type(tile) is int and tile > 0 for tile in tiles)
    assert list(tiles) == sorted(set(tiles))
    assert attention.query_counts == [tile // 2 for tile in tiles]
    rows = attention._target.rows_of_a_pass
    assert attention.tokens_of_a_pass == (None if rows is None else rows // 2)


@every_attention
def test_eager_forwards(make_pair, implementation):
    """The pair compares all outputs with plain torch, in this test and in those below."""
    pair = make_pair(implementation, num_layers=2)
    pair.prefill(a=2 * PAGE + 60, b=PAGE, c=3)
    # Second chunks begin within a page (a), and at a page's start (b).
    pair.prefill(a=10, b=7)
    # a and c stay within a page, and b begins none.
    pair.verify(a=1, b=3, c=5)
    # c fills its first page and begins another. a accepts fewer tokens than it verified.
    pair.verify({"a": 4}, a=8, c=PAGE)
    pair.verify(b=1)


@every_attention
@pytest.mark.parametrize("make", ["make_target_step", "make_short_target_step"])
def test_steps(make_pair, implementation, make):
    pair = make_pair(implementation)
    pair.prefill(a=2 * PAGE + 61, b=PAGE, c=3)
    steps = steps_of(pair, 4, make)
    # a fills its page.
    steps.advance(a=3, b=1, c=2)
    steps.advance(a=1, c=4)
    if not implementation.splits_by_page:
        # b crosses the end of a page within a round.
        pair.prefill(b=PAGE - 3)
        steps.advance(b=5)
    steps.advance(c=1)


@every_attention
def test_captured_verifications(make_pair, implementation):
    pair = make_pair(implementation)
    large, small = verifications_of(pair, VerifySize(16, 12), VerifySize(4, 2))
    pair.prefill(a=PAGE + 60, b=PAGE, c=3)
    large.verify({"a": 7}, a=9, b=2, c=5)
    # Fewer requests and tokens: the data of the larger verification must have no effect.
    small.verify(b=2)
    small.verify({"c": 1}, c=2, a=1)
    large.run_cleared()


@every_attention
def test_all_parts_on_one_cache(make_pair, implementation):
    """No part disturbs the plan or the workspace of another."""
    pair = make_pair(implementation)
    pair.prefill(a=PAGE + 50, b=PAGE + 3)
    steps = steps_of(pair, 2)
    (verification,) = verifications_of(pair, VerifySize(16, 12))
    steps.advance(a=2, b=1)
    verification.verify({"a": 2}, a=5, b=4)
    pair.verify(a=3)
    steps.advance(b=2)
    pair.prefill(b=PAGE)
    verification.verify(a=12)
    steps.advance(a=1)


DETERMINISTIC = {name: each for name, each in IMPLEMENTATIONS.items() if each.is_deterministic}


@pytest.mark.parametrize("implementation", DETERMINISTIC.values(), ids=DETERMINISTIC)
def test_a_deterministic_attention_gives_the_same_bits_in_all_parts(make_pair, implementation):
    end = 3 * PAGE + 5
    tokens = make_pair(implementation).draw(end)

    def pair_that_reads_tokens():
        """Return a pair whose requests all read `tokens`, in order, and the list of its outputs."""
        pair, outs = make_pair(implementation), []
        pair.draw = lambda count: tuple(part[sum(map(len, outs)) :][:count] for part in tokens)
        pair.compare = lambda got, want: outs.append(got.cpu().clone())
        return pair, outs

    whole, want = pair_that_reads_tokens()
    whole.prefill(a=end)
    parts, got = pair_that_reads_tokens()
    steps = steps_of(parts, 1)
    (verification,) = verifications_of(parts, VerifySize(16, 12))
    parts.prefill(a=PAGE + 7)
    parts.prefill(a=2 * PAGE - 20)
    parts.verify(a=5)
    verification.verify(a=7)
    # The steps cross the end of a page, where a round of steps ends if pages must be encoded.
    for count in (1, 3) if implementation.splits_by_page else (4,):
        steps.advance(a=count)
    parts.verify(a=2)
    assert torch.equal(torch.cat(got), want[0])


def without_past(attention, monkeypatch):
    """Let eager forwards see their tail alone."""
    plan = attention.plan

    def planned(self, rows):
        plan(self, rows)
        self._rows.past_indptr.zero_()

    monkeypatch.setattr(attention, "plan", planned)


def other_rows(attention, monkeypatch):
    """Let steps of a batch see the past of the row before."""
    step = attention.step

    def made(self, rows, batch):
        found = step(self, rows, batch)
        run = found.run
        found.run = lambda layer, q, tail: run(layer, q.roll(1, 0), tail)
        return found

    monkeypatch.setattr(attention, "step", made)


def unmasked(attention, monkeypatch):
    """Let tokens of a captured verification see one more token than there is."""
    make = attention.verifications

    def made(self, rows):
        found = make(self, rows)
        run = found.run
        found.run = lambda layer, q, tail: run(layer, q, tail._replace(lens=tail.lens + 1))
        return found

    monkeypatch.setattr(attention, "verifications", made)


FAULTS = [
    (without_past, test_eager_forwards),
    (other_rows, lambda *given: test_steps(*given, "make_target_step")),
    (unmasked, test_captured_verifications),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=lambda each: each.__name__)
def test_a_fault_of_one_part_is_found(make_pair, monkeypatch, fault, check):
    fault(TOY, monkeypatch)
    with pytest.raises(AssertionError, match=r"relative error|not 0"):
        check(make_pair, TOY)
