"""First tokens, chosen after prefills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_kvspec.adapters.requests import fail_without_choice, sampling_params_of
from sglang_kvspec.kv.forward_plan import Row
from sglang_kvspec.runtime.grammar import allowed_by, masks_along
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.spec_sampler import SpecSampler, VerifyResult

# Stands for no token in the message by which rank 0 broadcasts its tokens.
_NONE = -1


def first_tokens(
    reqs: Sequence[Any],
    rows: Sequence[Row],
    logits: torch.Tensor,
    sampler: SpecSampler,
    ranks: Ranks,
) -> list[VerifyResult | None]:
    """Choose each request's token from its row of logits [num_reqs, vocab], as rank 0 does.

    The entry of a chunk that is not the last is None: SGLang ignores its token. A request whose row
    allows no choice is failed, and its entry is None.
    """
    firsts: list[VerifyResult | None] = []
    for i, (req, row) in enumerate(zip(reqs, rows, strict=True)):
        if req.inflight_middle_chunks > 0:
            firsts.append(None)
            continue
        own = logits[i : i + 1]
        allowed = allowed_by(masks_along(req.grammar, (), own))
        params, output = sampling_params_of(req), list(req.output_ids)
        firsts.append(sampler.first(own, params, output, row.end, allowed))
    tokens = ranks.numbers(
        [_NONE if first is None else [*first.tokens, _NONE][0] for first in firsts],
        about=[(req.rid, row.end) for req, row in zip(reqs, rows, strict=True)],
    )
    results: list[VerifyResult | None] = []
    for req, first, token in zip(reqs, firsts, tokens, strict=True):
        if first is not None and token == _NONE:
            fail_without_choice(req)
            first = None
        results.append(None if first is None else first._replace(tokens=[token]))
    return results
