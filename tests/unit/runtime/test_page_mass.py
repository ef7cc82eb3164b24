"""Attention mass of pages, and the scores and choices made from it."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.budget_views import ScoredPages
from sglang_kvspec.runtime.draft_view import ViewShape
from sglang_kvspec.runtime.page_mass import page_mass
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams

SIZE = 4


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("num_tokens", [4, 13, 32])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_mass_is_the_mean_probability_of_a_pages_tokens(heads, num_tokens, num_queries):
    num_heads, num_kv_heads = heads
    q, k = torch.randn(num_queries, num_heads, 8), torch.randn(num_tokens, num_kv_heads, 8)
    num_pages = num_tokens // SIZE
    found = page_mass(q, k, num_pages, SIZE)
    expected = torch.zeros(num_kv_heads, num_pages, dtype=torch.float64)
    group = num_heads // num_kv_heads
    for i in range(num_queries):
        seen = num_tokens - num_queries + i + 1
        for head in range(num_heads):
            kv_head = head // group
            p = (k[:seen, kv_head].double() @ q[i, head].double()).softmax(0)
            for page in range(num_pages):
                expected[kv_head, page] += p[page * SIZE : (page + 1) * SIZE].sum()
    expected /= num_queries * group
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


def view_of(budget):
    config = KVSpecConfig(draft_view="pages", draft_budget=budget)
    return ScoredPages(config, ViewShape(1, 2, 0, SIZE))


def state_of(mass):
    return RequestState("r", 0, 0, [], SamplingParams(), 9, page_mass=mass)


def test_each_head_reads_its_best_pages_the_first_and_the_newest():
    mass = torch.zeros(1, 2, 20)
    mass[0, 0, [3, 9]] = torch.tensor([0.4, 0.5])
    mass[0, 1, [5, 17]] = torch.tensor([0.2, 0.1])
    # The sink and the newest pages are read anyway: their mass decides nothing.
    mass[0, :, [0, 18, 19]] = 9.0
    seen = view_of(0.1).select(state_of(mass), 20)
    assert seen.tolist() == [[[0, 3, 9, 18, 19], [0, 5, 17, 18, 19]]]


def test_pages_that_were_not_full_at_the_last_verification_are_read():
    mass = torch.zeros(1, 2, 17)
    mass[0, :, 3] = 1.0
    seen = view_of(0.05).select(state_of(mass), 20)
    assert seen.tolist() == [[[0, 3, 17, 18, 19]] * 2]


@pytest.mark.parametrize(
    ("mass", "num_pages"), [(None, 100), (torch.ones(1, 2, 4), 4), (torch.ones(1, 2, 0), 2)]
)
def test_all_pages_are_read_without_scores_or_where_they_are_few(mass, num_pages):
    assert view_of(0.1).select(state_of(mass), num_pages) is None
