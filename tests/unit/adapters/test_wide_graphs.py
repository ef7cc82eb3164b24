"""The sizes of wide steps, and the graphs that are captured of them."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters import wide_graphs
from sglang_kvspec.adapters.wide_graphs import MOST_TOKENS, WideGraphs, wide_sizes
from sglang_kvspec.runtime.draft_rows import DraftRows


def test_sizes_stay_within_the_tokens_of_a_step():
    sizes = wide_sizes(16, 32)
    assert (16, 4) in sizes
    assert (4, 16) in sizes
    assert all(batch * width <= MOST_TOKENS for batch, width in sizes)


def test_no_size_has_more_requests_than_the_server():
    assert wide_sizes(3, 32) == [(1, 4), (2, 4), (3, 4), (1, 16), (2, 16), (3, 16)]


@pytest.mark.parametrize(("most", "widths"), [(1, set()), (2, {4}), (4, {4}), (5, {4, 16})])
def test_no_step_is_wider_than_drafts_need(most, widths):
    assert {width for _, width in wide_sizes(4, most)} == widths


class FakeForward:
    """Graphs that record their replays."""

    def __init__(self):
        self.logits = torch.zeros(MOST_TOKENS, 1)
        self.captured, self.replayed = [], []
        self.reads_copies = False

    @contextmanager
    def copies(self):
        self.reads_copies = True
        yield
        self.reads_copies = False

    def capture(self, rows, num_tokens, stream, warm_ups):
        self.captured.append((num_tokens, self.reads_copies))
        return SimpleNamespace(replay=lambda: self.replayed.append(num_tokens))


@pytest.fixture
def make(monkeypatch):
    def made(max_batch=8, max_draft_len=16, most_rows=None):
        monkeypatch.setattr(
            wide_graphs, "graph_capture", lambda: nullcontext(SimpleNamespace(stream=None))
        )
        forward, begun = FakeForward(), []
        attention = SimpleNamespace(
            make_draft_step=lambda rows, batch, num_rows: (batch, num_rows),
            begin_wide_steps=lambda rows, step, num_rows: begun.append((*step, num_rows)),
            end_captured=lambda: None,
        )
        weights = None
        if most_rows is not None:
            weights = SimpleNamespace(most_rows=most_rows, in_force=forward.copies)
        drafts = DraftRows(max_batch, 16, 8, 32, torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        graphs = WideGraphs(forward, attention, drafts, max_draft_len, weights)
        # The start times each graph.
        forward.replayed.clear()
        return SimpleNamespace(forward=forward, graphs=graphs, begun=begun)

    return made


def test_attention_is_made_for_each_size(make):
    made = make()
    assert sorted(made.begun) == sorted((b, n, n) for b, n in made.graphs.sizes)


def test_steps_of_few_tokens_multiply_with_copies(make):
    made = make(most_rows=16)
    assert {copies for num, copies in made.forward.captured if num <= 16} == {True}
    assert {copies for num, copies in made.forward.captured if num > 16} == {False}


def test_the_smallest_step_with_room_is_replayed(make):
    made = make()
    graphs = made.graphs
    assert [graphs.width(2, n) for n in (1, 4, 5, 16)] == [4, 4, 16, 16]
    for requests, width in ((1, 4), (3, 4), (5, 4), (3, 16)):
        graphs.replay(requests, width)
    assert made.forward.replayed == [4, 16, 32, 64]


def test_more_requests_have_fewer_tokens_each(make):
    graphs = make(max_batch=20).graphs
    assert [graphs.most_tokens(n) for n in (1, 4, 5, 16, 17)] == [16, 16, 4, 4, 1]


def test_requests_of_one_draft_have_no_steps_of_several_tokens(make):
    graphs = make(max_draft_len=1).graphs
    assert not graphs.sizes
    assert not graphs.empty_step_s(1)
    assert graphs.most_tokens(1) == 1
