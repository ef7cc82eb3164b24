"""Accepts as many drafts as a measured curve says, inside a real server with meaningless weights.

A server that has this folder on PYTHONPATH loads it as an SGLang plugin. KVSPEC_REPLAY_CURVE names
a JSON file: `survival`, the probability that at least j drafts are accepted, for j = 1, 2, ...;
without it nothing is replaced. All requests must be greedy.
"""

from __future__ import annotations

import json
import os
import random
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path


class Replay:
    """Draws how many drafts each verification keeps, independently of one another.

    Seeded, so that the ranks of a tensor-parallel server, which verify in one order, agree.
    """

    def __init__(self, survival: Sequence[float], seed: int) -> None:
        assert all(a >= b for a, b in pairwise(survival)), survival
        self._falling = [-probability for probability in survival]
        self._random = random.Random(seed)

    def accept_matching(self, drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
        """In place of runtime/acceptance.py's: the first drafts, and the target's next token."""
        drawn = bisect_left(self._falling, -self._random.random())
        num_accepted = min(drawn, len(drafts))
        return [*drafts[:num_accepted], targets[num_accepted]]


def register() -> None:
    """Put the replay in place where a curve is named and this process serves KVSpec."""
    if "KVSPEC_REPLAY_CURVE" not in os.environ or "SGLANG_KVSPEC" not in os.environ:
        return
    from sglang_kvspec.runtime import spec_sampler

    curve = json.loads(Path(os.environ["KVSPEC_REPLAY_CURVE"]).read_text(encoding="utf-8"))
    spec_sampler.accept_matching = Replay(curve["survival"], seed=0).accept_matching
