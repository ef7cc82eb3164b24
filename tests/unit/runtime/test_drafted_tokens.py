"""Drafts on the device that enter a verification without passing the CPU."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.runtime.drafted_tokens import DraftedTokens


def drafted_by(lens):
    """Return drafts in which step s of request i gives token 100 i + s. Columns hold -1 past a
    request's drafts."""
    order = sorted((i for i, n in enumerate(lens) if n), key=lambda i: -lens[i])
    tokens = torch.full((max(lens), len(order)), -1)
    for column, i in enumerate(order):
        tokens[: lens[i], column] = 100 * i + torch.arange(lens[i])
    return DraftedTokens(tokens, order, lens)


def placed(drafted, lens, held=None, verifies=None):
    """Return the input tokens of a verification, by request: the pending token and drafts of
    earlier rounds, all 7, then the drafts."""
    held = held or [0] * len(lens)
    verifies = verifies or [True] * len(lens)
    firsts, total = [], 0
    for n, before, takes_part in zip(lens, held, verifies, strict=False):
        firsts.append(total + 1 + before if takes_part else -1)
        total += (n + 1 + before) * takes_part
    input_ids = torch.full((total,), 7)
    drafted.place(input_ids, firsts)
    return input_ids.tolist()


some_lens = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any)


@given(
    lens=some_lens,
    verifies=st.lists(st.booleans(), min_size=6, max_size=6),
    held=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_drafts_reach_their_own_request(lens, verifies, held):
    """Verifying requests have `held` drafts of earlier rounds before the new ones."""
    drafted = drafted_by(lens)
    wanted = {i: [100 * i + step for step in range(n)] for i, n in enumerate(lens)}
    assert drafted.deliver() == {i: drafts for i, drafts in wanted.items() if drafts}
    tokens = [t for i in wanted if verifies[i] for t in (*[7] * (held[i] + 1), *wanted[i])]
    assert placed(drafted, lens, held, verifies) == tokens


@given(some_lens, st.randoms(use_true_random=False))
def test_drafts_follow_their_requests_into_another_batch(lens, rng):
    """Some requests leave, new ones arrive, and the rest change places."""
    batch = [i for i in range(len(lens)) if rng.random() < 0.7] + [None] * rng.randint(0, 2)
    rng.shuffle(batch)
    places = {i: now for now, i in enumerate(batch) if i is not None}
    new_lens = [0 if i is None else lens[i] for i in batch]
    drafted = drafted_by(lens).rearranged(places, new_lens)
    wanted = [[] if i is None else [100 * i + s for s in range(lens[i])] for i in batch]
    assert drafted.deliver() == {i: drafts for i, drafts in enumerate(wanted) if drafts}
    if new_lens:
        assert placed(drafted, new_lens) == [t for drafts in wanted for t in (7, *drafts)]


@given(lens=some_lens, drafts_on=st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_request_that_does_not_verify_drafts_on_behind_its_last_draft(lens, drafts_on):
    """Rows that draft on come before the tokens of the verifying requests."""
    going = [i for i in range(len(lens)) if drafts_on[i]]
    lasts = [going.index(i) if drafts_on[i] else -1 for i in range(len(lens))]
    firsts, total = [], len(going)
    for i, n in enumerate(lens):
        firsts.append(-1 if drafts_on[i] else total + 1)
        total += 0 if drafts_on[i] else n + 1
    input_ids = torch.full((total,), 7)
    drafted_by(lens).place(input_ids, firsts, lasts)
    # A request without drafts in this round continues from its earlier token.
    wanted = [100 * i + lens[i] - 1 if lens[i] else 7 for i in going]
    for i, n in enumerate(lens):
        wanted += [] if drafts_on[i] else [7, *(100 * i + step for step in range(n))]
    assert input_ids.tolist() == wanted
