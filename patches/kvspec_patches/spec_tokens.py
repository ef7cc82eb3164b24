"""SchedulerBatchResultProcessor._resolve_spec_v2_tokens: plain tokens are not counted as drafts.

SGLang 0.5.17 counts all but one token of every run as accepted drafts, and every run as a
verification. A result without cap_lens is of an iteration without drafts and verifications: the
hook subtracts what SGLang counted for it.
"""

from __future__ import annotations

from typing import Any


def hook(tokens: list[list[int]], self: Any, result: Any, batch: Any) -> None:
    if result.cap_lens is not None:
        return
    for req, num_extra in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True):
        # Runs of length 0 are not counted in the first place (drafts_histogram).
        if num_extra < 0 or req.is_retracted or req.finished():
            continue
        req.spec_verify_ct -= 1
        req.spec_num_correct_drafts -= num_extra
        histogram = req.spec_correct_drafts_histogram
        histogram[num_extra] -= 1
        while histogram and not histogram[-1]:
            histogram.pop()
