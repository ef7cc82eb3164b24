"""Drafts that go from the steps that made them into a verification without passing the CPU."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.runtime.draft_rows import DraftedTokens
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams


def make_state(index):
    return RequestState(
        rid=str(index),
        committed_len=3,
        pending=1,
        output=[1],
        params=SamplingParams(temperature=0, top_k=1),
        remaining=100,
    )


@given(
    lens=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
    verifies=st.lists(st.booleans(), min_size=6, max_size=6),
    held=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_drafts_reach_their_own_request(lens, verifies, held):
    """Request i's step s drafts 100 i + s; columns past a request's drafts hold other things. Those
    that verify have `held` drafts of earlier rounds before."""
    order = sorted((i for i, n in enumerate(lens) if n), key=lambda i: -lens[i])
    tokens = torch.full((max(lens), len(order)), -1)
    for column, i in enumerate(order):
        tokens[: lens[i], column] = 100 * i + torch.arange(lens[i])
    drafted = DraftedTokens(tokens, order, lens)
    # A verification's tokens: the pending one, then the drafts, request after request.
    firsts, total = [], 0
    for i, n in enumerate(lens):
        firsts.append(total + 1 + held[i] if verifies[i] else -1)
        total += (n + 1 + held[i]) * verifies[i]
    input_ids = torch.full((total,), 7)
    drafted.place(input_ids, firsts)
    states = [make_state(i) for i in range(len(lens))]
    for i, state in enumerate(states):
        state.drafts = [7] * held[i]
    drafted.deliver(states)
    want = []
    for i, n in enumerate(lens):
        drafts = [7] * held[i] + [100 * i + step for step in range(n)]
        assert states[i].drafts == drafts
        want += [7, *drafts] if verifies[i] else []
    assert input_ids.tolist() == want
