"""One of several ranks that decide together, for test_ranks.py.

    python rank_process.py RANK SIZE RENDEZVOUS

Prints what every case gave as JSON. What a rank chooses by itself differs from the others'.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_kvspec.core.errors import RanksDisagree
from sglang_kvspec.runtime.chooser import Chooser
from sglang_kvspec.runtime.ranks import Ranks, agree, agree_on_drafts
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams

VOCAB, NUM_ROUNDS, MAX_DRAFTS = 40, 12, 4
KINDS = {
    "greedy": SamplingParams(top_k=1),
    "seeded": SamplingParams(temperature=0.9, top_k=20, seed=42),
    "unseeded": SamplingParams(temperature=1.1, top_p=0.95),
}


def messages(ranks: Ranks) -> dict[str, Any]:
    """Every kind of message, with contents of this rank's own."""
    own = 100 * ranks.rank
    grid = torch.arange(12).reshape(3, 4) + own
    return {
        "numbers": ranks.numbers([own + 1, own + 2], about="same"),
        "no_numbers": ranks.numbers([], about="same"),
        "least": ranks.least([own, 5 - own, 7], about="same"),
        "no_least": ranks.least([], about="same"),
        "runs": ranks.runs([[own], [own] * (ranks.rank + 1), []], [1, 3, 2], about="same"),
        # A part of a larger tensor, as drafts of fewer requests than there can be.
        "tensor": ranks.tensor(grid[:2, :3]).tolist(),
    }


def rounds(ranks: Ranks) -> dict[str, Any]:
    """Requests that draft and verify by logits of this rank's own."""
    noise = torch.Generator().manual_seed(ranks.rank)
    chooser = Chooser(ranks.rank, torch.device("cpu"))
    states = [RequestState(name, 10, 1, [1], params, 500) for name, params in KINDS.items()]
    for number in range(NUM_ROUNDS):
        # Much alike, so that some drafts are accepted.
        target = torch.randn((MAX_DRAFTS + 1, VOCAB), generator=noise) * 4
        lens = ranks.numbers([1 + (number + ranks.rank) % MAX_DRAFTS] * len(states), about=number)
        for step in range(lens[0]):
            for state in states:
                near = target[step : step + 1] + torch.randn((1, VOCAB), generator=noise)
                chooser.draft(state, near, None)
            agree_on_drafts(ranks, states)
        # The last request only drafts this time: its last draft goes with what the others emit.
        verifying = states[: 2 + number % 2]
        for state in states[len(verifying) :]:
            chooser.draft(state, target[:1], None)
        chosen = [chooser.verify(s, target[: len(s.drafts) + 1], None) for s in verifying]
        none = [None] * (len(states) - len(verifying))
        for state, verified in zip(states, agree(ranks, states, [*chosen, *none]), strict=True):
            if verified is not None:
                assert len(verified.tokens) <= len(verified.logits)
                state.commit(verified.tokens)
        for state in states[len(verifying) :]:
            state.drafts.clear()
            state.draft_probs.clear()
    return {state.rid: [state.committed_len, state.output] for state in states}


def apart(ranks: Ranks) -> list[str]:
    """Refusals of ranks that serve other requests, and of ones that expect more than comes."""
    return [
        _refusal(lambda: ranks.numbers([1, 2], about=[("request", ranks.rank)])),
        _refusal(lambda: ranks.numbers([1] * (1 + ranks.rank), about="same")),
        _refusal(lambda: ranks.least([1, 2], about=[("request", ranks.rank)])),
    ]


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except RanksDisagree as error:
        return str(error)
    return ""


def main() -> None:
    rank, size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    group = dist.new_group(list(range(size)), backend="gloo")
    ranks = Ranks(rank, size, group, group)
    results = {
        "messages": messages(ranks),
        "together": rounds(ranks),
        # The same without messages.
        "alone": rounds(Ranks(rank)),
        "apart": apart(ranks),
    }
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
