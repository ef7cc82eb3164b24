"""One of several ranks that decide together, for test_ranks.py.

    python rank_process.py RANK SIZE RENDEZVOUS

Prints the results of all cases as JSON. The own choices of each rank differ from the others'.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from kvspec_testkit.runtime.rank_group import refusal, this_rank
from sglang_kvspec.runtime.ranks import Ranks, broadcast_drafts, broadcast_runs, broadcast_tokens
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.spec_sampler import SpecSampler

VOCAB, NUM_ROUNDS, MAX_DRAFTS = 40, 12, 4
KINDS = {
    "greedy": SamplingParams(top_k=1),
    "seeded": SamplingParams(temperature=0.9, top_k=20, seed=42),
    "unseeded": SamplingParams(temperature=1.1, top_p=0.95),
}


def messages(ranks: Ranks) -> dict[str, Any]:
    """Send every kind of message, with contents that differ by rank."""
    own = 100 * ranks.rank
    grid = torch.arange(12).reshape(3, 4) + own
    return {
        "numbers": ranks.numbers([own + 1, own + 2], about="same"),
        "no_numbers": ranks.numbers([], about="same"),
        "least": ranks.least([own, 5 - own, 7], about="same"),
        "no_least": ranks.least([], about="same"),
        "gather": ranks.gather([own, -1 << 63], about="same"),
        "runs": ranks.runs([[own], [own] * (ranks.rank + 1), []], [1, 3, 2], about="same"),
        # A part of a larger tensor, as for drafts of a batch smaller than the largest.
        "tensor": ranks.tensor(grid[:2, :3]).tolist(),
    }


def rounds(ranks: Ranks) -> dict[str, Any]:
    """Let requests draft and verify, with logits that differ by rank."""
    noise = torch.Generator().manual_seed(ranks.rank)
    sampler = SpecSampler(ranks.rank, torch.device("cpu"))
    states = [RequestState(name, 10, 1, [1], params, 500) for name, params in KINDS.items()]
    for number in range(NUM_ROUNDS):
        # Draft logits are similar to the target's, so that some drafts are accepted.
        target = torch.randn((MAX_DRAFTS + 1, VOCAB), generator=noise) * 4
        lens = ranks.numbers([1 + (number + ranks.rank) % MAX_DRAFTS] * len(states), about=number)
        for step in range(lens[0]):
            for state in states:
                near = target[step : step + 1] + torch.randn((1, VOCAB), generator=noise)
                sampler.draft(state, near, None)
            broadcast_drafts(ranks, states)
        # In every other round the last request only drafts. Its last draft is broadcast with the
        # tokens of the others.
        verifying = states[: 2 + number % 2]
        for state in states[len(verifying) :]:
            sampler.draft(state, target[:1], None)
        chosen = [sampler.verify(s, target[: len(s.drafts) + 1], None) for s in verifying]
        none = [None] * (len(states) - len(verifying))
        for state, verified in zip(
            states, broadcast_tokens(ranks, states, [*chosen, *none]), strict=True
        ):
            if verified is not None:
                assert len(verified.tokens) <= len(verified.logits)
                state.commit(verified.tokens)
        for state in states[len(verifying) :]:
            state.drafts.clear()
            state.draft_probs.clear()
    return {state.rid: [state.committed_len, state.output] for state in states}


def runs_of_drafts(ranks: Ranks) -> dict[str, Any]:
    """Let requests make several drafts at once, on other ranks fewer or more than on rank 0. Return
    the drafts, and how many distributions they have."""
    noise = torch.Generator().manual_seed(ranks.rank)
    sampler = SpecSampler(ranks.rank, torch.device("cpu"))
    found = {}
    for name, params in KINDS.items():
        states = [RequestState(f"{name} {i}", 10, 1, [1], params, 500) for i in range(2)]
        before = []
        for i, state in enumerate(states):
            sampler.draft(state, torch.randn((1, VOCAB), generator=noise), None)
            broadcast_drafts(ranks, [state])
            before.append(len(state.drafts))
            for _ in range(1 + (ranks.rank + i) % 2):
                sampler.draft(state, torch.randn((1, VOCAB), generator=noise), None)
        broadcast_runs(ranks, states, before, [2, 2])
        found[name] = [[s.drafts, len(s.draft_probs)] for s in states]
    return found


def out_of_order(ranks: Ranks) -> list[str]:
    """Return the refusals of ranks that serve other requests, and of ranks that expect more than
    they receive."""
    return [
        refusal(lambda: ranks.numbers([1, 2], about=[("request", ranks.rank)])),
        refusal(lambda: ranks.numbers([1] * (1 + ranks.rank), about="same")),
        refusal(lambda: ranks.least([1, 2], about=[("request", ranks.rank)])),
    ]


def main() -> None:
    with this_rank(Ranks) as ranks:
        results = {
            "messages": messages(ranks),
            "together": rounds(ranks),
            # The same without messages.
            "alone": rounds(Ranks(ranks.rank)),
            "runs_together": runs_of_drafts(ranks),
            "runs_alone": runs_of_drafts(Ranks(ranks.rank)),
            "out_of_order": out_of_order(ranks),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
