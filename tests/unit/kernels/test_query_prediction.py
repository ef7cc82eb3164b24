"""Prediction of the next query."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.reference.query_prediction import predict_query


@pytest.mark.parametrize("softmax", [True, False])
def test_queries_that_stay_are_predicted_to_stay(softmax):
    query = torch.randn(3, 16)
    found = predict_query(query.expand(6, -1, -1), softmax=softmax)
    torch.testing.assert_close(found, query, rtol=0.01, atol=0.01)


def test_a_single_query_is_its_own_prediction():
    query = torch.randn(1, 3, 16)
    assert torch.equal(predict_query(query), query[0])


def test_weights_are_those_of_a_ridge_regression():
    """Two queries: one window of one query, whose weight has a closed form."""
    first, second = torch.randn(2, 1, 8).unbind()
    scale = torch.stack((first, second)).square().mean() * 8
    weight = (first @ second.T) / (first @ first.T + 1e-2 * scale)
    found = predict_query(torch.stack((first, second)), softmax=False)
    torch.testing.assert_close(found, weight * second)
    # One weight that is normalised is 1.
    torch.testing.assert_close(predict_query(torch.stack((first, second))), second)


def test_heads_are_predicted_by_themselves():
    queries = torch.randn(5, 4, 8)
    whole = predict_query(queries)
    for head in range(4):
        torch.testing.assert_close(predict_query(queries[:, head : head + 1])[0], whole[head])


def test_a_rotation_is_followed_better_than_by_the_newest_query():
    """Queries that turn by one angle a step, as rotary positions turn them."""
    angles = 0.3 * torch.arange(10.0)
    queries = torch.stack((angles.cos(), angles.sin()), dim=-1)[:, None]
    found = predict_query(queries[:9], softmax=False)
    newest = queries[8]
    assert (found - queries[9]).norm() < (newest - queries[9]).norm()
