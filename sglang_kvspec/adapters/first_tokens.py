"""The tokens that prefills choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_kvspec.adapters.grammar import allowed_by, masks_along
from sglang_kvspec.adapters.requests import sampling_params_of
from sglang_kvspec.runtime.chooser import Chooser, Verified
from sglang_kvspec.runtime.forward_plan import Row
from sglang_kvspec.runtime.ranks import Ranks


def first_tokens(
    reqs: Sequence[Any],
    rows: Sequence[Row],
    logits: torch.Tensor,
    chooser: Chooser,
    ranks: Ranks,
) -> list[Verified | None]:
    """Of each request by its row of logits [num_reqs, vocab]; those of the first rank. None for a
    chunk that is not the last: SGLang ignores its token."""
    firsts: list[Verified | None] = []
    for i, (req, row) in enumerate(zip(reqs, rows, strict=True)):
        if req.inflight_middle_chunks > 0:
            firsts.append(None)
            continue
        own = logits[i : i + 1]
        allowed = allowed_by(masks_along(req.grammar, (), own))
        params, output = sampling_params_of(req), list(req.output_ids)
        firsts.append(chooser.first(own, params, output, row.end, allowed))
    tokens = ranks.numbers(
        [0 if first is None else first.tokens[0] for first in firsts],
        about=[(req.rid, row.end) for req, row in zip(reqs, rows, strict=True)],
    )
    return [
        None if first is None else first._replace(tokens=[token])
        for first, token in zip(firsts, tokens, strict=True)
    ]
