"""Counts of accepted drafts in SGLang's requests after a round of plain steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req

from kvspec_patches import spec_tokens


def make_req(**fields: Any) -> Any:
    req = Req.__new__(Req)
    values = {
        "is_retracted": False,
        "finished_reason": None,
        "spec_verify_ct": 3,
        "spec_num_correct_drafts": 9,
        "spec_correct_drafts_histogram": [1, 0, 1, 0, 0, 0, 0, 1],
    }
    for name, value in (values | fields).items():
        setattr(req, name, value)
    return req


def counts(req: Any) -> tuple[int, int, list[int]]:
    return req.spec_verify_ct, req.spec_num_correct_drafts, req.spec_correct_drafts_histogram


def test_tokens_taken_without_drafts_are_not_counted_as_accepted() -> None:
    # SGLang counted a run of eight last. One request emitted nothing, and one had finished before.
    reqs = [make_req(), make_req(), make_req(finished_reason="length")]
    result = SimpleNamespace(cap_lens=None, num_correct_drafts_per_req_cpu=[7, -1, 7])
    spec_tokens.hook([], None, result, SimpleNamespace(reqs=reqs))
    assert counts(reqs[0]) == (2, 2, [1, 0, 1])
    assert counts(reqs[1]) == counts(reqs[2]) == counts(make_req())


def test_verified_drafts_are_counted() -> None:
    req = make_req()
    result = SimpleNamespace(cap_lens=torch.tensor([8]), num_correct_drafts_per_req_cpu=[7])
    spec_tokens.hook([], None, result, SimpleNamespace(reqs=[req]))
    assert counts(req) == counts(make_req())
