"""Tokens and positions of a forward's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.runtime.request_state import RequestState


class RowTokens(NamedTuple):
    """Tokens and positions of all rows, one row after the other. 0 stands for a token that only the
    device knows. firsts[i]: index of the first such draft of request i, -1 without a VERIFY row.
    lasts[i]: index of the last token of request i, -1 without a DRAFT row."""

    tokens: list[int]
    positions: list[int]
    firsts: list[int]
    lasts: list[int]


def row_tokens(states: Sequence[RequestState], rows: Mapping[int, Row]) -> RowTokens:
    """Lay out the rows of one forward. rows: by index of the request."""
    laid = RowTokens([], [], [-1] * len(states), [-1] * len(states))
    for i, row in rows.items():
        if row.kind is RowKind.DRAFT:
            known = row.length - len(row.proposed)
            given = [*states[i].undrafted[-known:], *row.proposed]
            laid.lasts[i] = len(laid.tokens) + len(given) - 1
        else:
            given = states[i].unverified
            laid.firsts[i] = len(laid.tokens) + len(given)
        laid.tokens.extend(given)
        laid.tokens.extend([0] * (row.length - len(given)))
        laid.positions.extend(range(row.start, row.start + row.length))
    return laid
