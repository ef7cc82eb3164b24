"""Queries that a device keeps of each row of a forward."""

from __future__ import annotations

import torch

from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.runtime.device_queries import DeviceQueries

MOST, MAX_ROWS, MAX_DRAFTS, LAYERS = 3, 4, 4, 2
NO_PAGES = torch.empty(0, dtype=torch.int64)


def make_queries():
    shape = (LAYERS, 2, 8)
    return DeviceQueries(MOST, MAX_ROWS, MAX_DRAFTS, shape, torch.float32, torch.device("cpu"))


def rows_of(*kinds_and_spans):
    return [Row(kind, start, length, NO_PAGES) for kind, start, length in kinds_and_spans]


def kept(queries, layer, index, end):
    first, count = queries.before(index, end)
    return queries.by_layer[layer, first : first + count]


def test_rows_keep_the_last_queries_of_what_was_verified():
    queries = make_queries()
    rows = rows_of(
        (RowKind.PREFILL, 10, 9), (RowKind.DRAFT, 5, 1), (RowKind.VERIFY, 20, 5),
        (RowKind.PREFILL, 0, 2),
    )  # fmt: skip
    q = torch.randn(LAYERS, 17, 2, 8)
    queries.begin(rows)
    for layer in range(LAYERS):
        queries.keep(layer, q[layer])
    for layer in range(LAYERS):
        assert torch.equal(kept(queries, layer, 0, 19), q[layer, 6:9])
        # The verification kept 2 of its 5 tokens, then all.
        assert torch.equal(kept(queries, layer, 2, 22), q[layer, 10:12])
        assert torch.equal(kept(queries, layer, 2, 25), q[layer, 12:15])
        assert torch.equal(kept(queries, layer, 3, 2), q[layer, 15:17])
    assert queries.before(1, 6)[1] == 0, "a draft's query is not verified"


def test_a_replay_keeps_all_queries_where_they_are():
    queries = make_queries()
    address = queries.by_layer.data_ptr()
    q = torch.randn(LAYERS, 12, 2, 8)
    for layer in range(LAYERS):
        queries.keep_all(layer, q[layer])
    queries.begin_captured(rows_of((RowKind.VERIFY, 7, 5), (RowKind.VERIFY, 30, 3)))
    assert torch.equal(kept(queries, 1, 0, 9), q[1, :2])
    assert torch.equal(kept(queries, 1, 0, 12), q[1, 2:5])
    assert torch.equal(kept(queries, 0, 1, 31), q[0, 5:6])
    assert queries.by_layer.data_ptr() == address, "a captured graph writes the old tensor"


def test_padding_of_a_large_replay_is_dropped():
    queries = make_queries()
    q = torch.randn(queries.max_tokens + 5, 2, 8)
    queries.keep_all(0, q)
    assert torch.equal(queries.by_layer[0], q[: queries.max_tokens])
