"""Replay of measured acceptance inside a real server, whose weights may be dummies.

A server that has this folder on PYTHONPATH loads it as an SGLang plug-in. KVSPEC_REPLAY_CURVE names
a JSON file. Its `traces` say for each token of whole requests whether a draft of it is right, by
share of pages that drafts read. Or its `survival` is the probability that at least j drafts are
accepted, for j = 1, 2, ... Without the variable, nothing is replaced. All requests must be greedy.
"""

from __future__ import annotations

import json
import os
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any


class Replay:
    """Random accept lengths, drawn independently for each verification.

    The seed makes the ranks of a tensor-parallel server agree: all verify in the same order.
    """

    def __init__(self, survival: Sequence[float], seed: int) -> None:
        assert all(a >= b for a, b in pairwise(survival)), survival
        self._falling = [-probability for probability in survival]
        self._random = random.Random(seed)

    def accept_matching(self, drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
        """Return the first drafts, and the target's next token. Replaces the function of the same
        name in runtime/acceptance.py."""
        drawn = bisect_left(self._falling, -self._random.random())
        num_accepted = min(drawn, len(drafts))
        return [*drafts[:num_accepted], targets[num_accepted]]


class TraceReplay:
    """Accept lengths of recorded requests, by draft budget. Request after request takes the next
    trace, and begins it again at its end."""

    def __init__(self, traces: Mapping[float, Sequence[str]]) -> None:
        self._traces = dict(sorted(traces.items()))
        # Trace and place in it, by request.
        self._at: dict[str, tuple[int, int]] = {}

    def accept(self, state: Any, targets: Sequence[int], num_sound: int) -> list[int]:
        """Return the first drafts of a request, and the target's next token. Replaces
        SpecSampler.judge."""
        if not num_sound:
            return []
        number, place = self._at.setdefault(state.rid, (len(self._at), 0))
        traces = self._traces.get(state.budget)
        if traces is None:
            raise ValueError(
                f"no trace was recorded at the draft budget {state.budget} (recorded: "
                f"{', '.join(map(str, self._traces))}): set --kvspec-draft-budget"
            )
        trace, drafts = traces[number % len(traces)], state.drafts
        kept = 0
        while kept < len(drafts) and trace[(place + kept) % len(trace)] == "1":
            kept += 1
        self._at[state.rid] = (number, place + kept + 1)
        return [*drafts[:kept], targets[kept]]


def register() -> None:
    """Install the replay if a curve is named and this process serves KVSpec."""
    if "KVSPEC_REPLAY_CURVE" not in os.environ or "SGLANG_KVSPEC" not in os.environ:
        return
    from sglang_kvspec.runtime import spec_sampler

    curve = json.loads(Path(os.environ["KVSPEC_REPLAY_CURVE"]).read_text(encoding="utf-8"))
    if "traces" in curve:
        replay = TraceReplay({float(share): each for share, each in curve["traces"].items()})
        spec_sampler.SpecSampler.judge = staticmethod(replay.accept)
    else:
        spec_sampler.accept_matching = Replay(curve["survival"], seed=0).accept_matching
