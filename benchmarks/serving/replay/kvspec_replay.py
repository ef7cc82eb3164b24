"""Replay of a measured acceptance curve inside a real server, whose weights may be dummies.

A server that has this folder on PYTHONPATH loads it as an SGLang plug-in. KVSPEC_REPLAY_CURVE names
a JSON file. Its `survival` is the probability that at least j drafts are accepted, for j = 1, 2,
... Without the variable, nothing is replaced. All requests must be greedy.
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


def register() -> None:
    """Install the replay if a curve is named and this process serves KVSpec."""
    if "KVSPEC_REPLAY_CURVE" not in os.environ or "SGLANG_KVSPEC" not in os.environ:
        return
    from sglang_kvspec.runtime import spec_sampler

    curve = json.loads(Path(os.environ["KVSPEC_REPLAY_CURVE"]).read_text(encoding="utf-8"))
    spec_sampler.accept_matching = Replay(curve["survival"], seed=0).accept_matching
