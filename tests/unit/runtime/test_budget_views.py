"""Choices of draft views that read a share of the pages."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.budget_views import ScoredPages
from sglang_kvspec.runtime.draft_view import PageCounts, ViewShape
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams

VIEW = ScoredPages(KVSpecConfig(), ViewShape(1, 2, 0, 4))


def state_of(mass, budget):
    count = 0 if mass is None else mass.shape[-1]
    state = RequestState("r", 0, 0, [], SamplingParams(), 9, num_scored=count, page_mass=mass)
    state.budget = budget
    return state


def test_each_head_reads_its_best_pages_the_first_and_the_newest():
    mass = torch.zeros(1, 2, 20)
    mass[0, 0, [3, 9]] = torch.tensor([0.4, 0.5])
    mass[0, 1, [5, 17]] = torch.tensor([0.2, 0.1])
    # The sink and the newest pages are read anyway: their mass decides nothing.
    mass[0, :, [0, 18, 19]] = 9.0
    seen = VIEW.select(state_of(mass, 0.1), 20)
    assert seen.tolist() == [[[0, 3, 9, 18, 19], [0, 5, 17, 18, 19]]]


def test_pages_without_a_mass_are_read():
    mass = torch.zeros(1, 2, 17)
    mass[0, :, 3] = 1.0
    state = state_of(mass, 0.05)
    assert VIEW.counts(state, 20) == PageCounts(best=1, newest=17)
    assert VIEW.select(state, 20).tolist() == [[[0, 3, 17, 18, 19]] * 2]


@pytest.mark.parametrize(
    ("mass", "num_pages"), [(None, 100), (torch.ones(1, 2, 4), 4), (torch.ones(1, 2, 1), 3)]
)
def test_all_pages_are_read_without_scores_or_where_they_are_few(mass, num_pages):
    assert VIEW.select(state_of(mass, 0.1), num_pages) is None
    assert VIEW.select(state_of(mass, 1.0), num_pages) is None
