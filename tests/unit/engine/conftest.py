"""Small fakes of the parts that the engine needs from a model and a server."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.engine.starter import RoundStarter
from sglang_kvspec.planning.round_plan import RoundBudget
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens

NO_BUDGET = RoundBudget(0, 0)


class FakeSide(nullcontext):
    """Side stream that counts how often the main stream waited for it."""

    def __init__(self):
        super().__init__()
        self.joins = 0

    def join(self):
        self.joins += 1


class FakeArrivals:
    """Arrivals with requests whose residuals are on the network."""

    def __init__(self, *pending, come_with_requests=False):
        self.pending, self.come_with_requests = set(pending), come_with_requests

    @property
    def may_be_pending(self):
        return bool(self.pending)

    def is_pending(self, state):
        return state.rid in self.pending


class FakeScheduler:
    """Scheduler that plans the same lens for every round."""

    def __init__(self, *lens, may_advance=True, piggybacks_sampled=False, most_drafts=100):
        self.schedule = RoundSchedule(list(lens), NO_BUDGET, may_advance=may_advance)
        self.piggybacks_sampled = piggybacks_sampled
        self.most_drafts = most_drafts
        self.asked = []

    def plan(self, states, late=(), num_drafts=None):
        self.asked.append((list(states), late, num_drafts))
        return self.schedule

    def piggybacks(self, state, num_drafts):
        return num_drafts < self.most_drafts


def batch_of(states, **fields):
    pages = [torch.arange(4)] * len(states)
    return RoundBatch(states, pages, [None] * len(states), **fields)


def schedule_of(*lens, **fields):
    return RoundSchedule(list(lens), NO_BUDGET, **fields)


def drafts_on_device(batch, lens):
    """Return drafts that only a device knows."""
    order = [i for i, n in enumerate(lens) if n]
    tokens = torch.zeros((max(lens), len(order)), dtype=torch.int64)
    return DraftedTokens(tokens, order, list(lens))


def starter_of(**parts):
    """Make a starter of a machine that holds all residuals, whose drafter always drafts token 0.
    host_pages: pages of its residual store."""
    plan = SimpleNamespace(host_pages=parts.pop("host_pages", 0))
    kv = SimpleNamespace(
        device=torch.device("cpu"), plan=plan, geometry=SimpleNamespace(page_size=64)
    )
    given = {
        "kv": kv,
        "side": FakeSide(),
        "drafter": SimpleNamespace(draft=drafts_on_device),
        "planner": SimpleNamespace(),
        "arrivals": FakeArrivals(),
    }
    return RoundStarter(**(given | parts))


@pytest.fixture(scope="session")
def fakes():
    """The classes and functions of this module, for tests to use by name."""
    return SimpleNamespace(
        Side=FakeSide,
        Arrivals=FakeArrivals,
        Scheduler=FakeScheduler,
        batch_of=batch_of,
        drafts_on_device=drafts_on_device,
        schedule_of=schedule_of,
        starter_of=starter_of,
    )
