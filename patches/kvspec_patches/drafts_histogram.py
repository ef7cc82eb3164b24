"""Req.update_spec_correct_drafts_histogram: an iteration that only drafted verified nothing.

SGLang 0.5.17 counts every iteration of a speculative request as one verification. For an iteration
that accepted no token it passes -1, which indexes an empty histogram or corrupts its last bin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., None], self: Any, num_correct_drafts: int) -> None:
    if num_correct_drafts < 0:
        self.spec_num_correct_drafts -= num_correct_drafts
        self.spec_verify_ct -= 1
        return
    original(self, num_correct_drafts)
