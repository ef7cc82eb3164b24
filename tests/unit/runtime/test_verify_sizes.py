"""Sizes of captured verifications, and the choice of one that is large enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.runtime.verify_sizes import (
    TOKEN_COUNTS,
    VerifySize,
    find_size,
    sizes_to_capture,
)

QUERY_COUNTS = ([4, 16], [2, 8], [4, 8, 16, 32], [16])


@st.composite
def servers(draw):
    """Draw the number of requests, tokens of one, and where kernels change; then a verification on
    this server."""
    max_rows, longest = draw(st.integers(1, 300)), draw(st.integers(2, 65))
    num_rows = draw(st.integers(1, min(max_rows, 40)))
    lengths = draw(st.lists(st.integers(1, longest), min_size=num_rows, max_size=num_rows))
    return max_rows, longest, draw(st.sampled_from(QUERY_COUNTS)), lengths


@given(servers(), st.integers(0, 64))
def test_whatever_a_server_verifies_has_a_size_up_to_the_largest(server, num_piggyback):
    max_rows, longest, query_counts, lengths = server
    sizes = sizes_to_capture(max_rows, longest, query_counts, num_piggyback)
    size = find_size(sizes, lengths)
    if size is not None:
        assert size.num_tokens >= sum(lengths)
        assert size.max_qo_len >= max(lengths)
        assert size.num_tokens - size.max_qo_len + 1 >= len(lengths)
    else:
        # The longest requests may have so many tokens that others have no room.
        assert sum(lengths) + longest > TOKEN_COUNTS[-1]


def test_kernels_for_one_token_more_are_not_captured_twice():
    sizes = sizes_to_capture(1, 33, [4, 16, 32])
    assert [size.max_qo_len for size in sizes] == [4, 16, 33]


@given(servers())
def test_the_kernel_is_the_one_of_its_longest_request(server):
    max_rows, longest, query_counts, lengths = server
    sizes = sizes_to_capture(max_rows, longest, query_counts)
    size = find_size(sizes, lengths)
    if size is not None:
        smaller = [s for s in sizes if max(lengths) <= s.max_qo_len < size.max_qo_len]
        assert all(
            s.num_tokens < sum(lengths) or s.num_tokens - s.max_qo_len + 1 < len(lengths)
            for s in smaller
        )


def test_a_server_for_one_request_captures_little():
    assert sizes_to_capture(1, 33, [4, 16]) == (
        VerifySize(8, 4),
        VerifySize(16, 16),
        VerifySize(48, 33),
    )


def test_no_size_is_beyond_what_requests_can_fill():
    sizes = sizes_to_capture(4, 9, [4, 16])
    assert sizes == (
        VerifySize(8, 4),
        VerifySize(16, 4),
        VerifySize(16, 9),
        VerifySize(32, 9),
        VerifySize(48, 9),
    )


@pytest.mark.parametrize(
    ("num_verified", "num_piggyback", "num_tokens"),
    [
        (107, 21, 107),
        (108, 21, 128),
        (139, 21, 139),
        (140, 21, 160),
        (112, 16, 112),
        (112, 0, 128),
        (112, 32, 128),
        (112, 150, 128),
    ],
)
def test_a_verification_with_piggyback_drafts_fits_the_products_where_it_can(
    num_verified, num_piggyback, num_tokens
):
    sizes = sizes_to_capture(21, 64, [64], num_piggyback)
    assert find_size(sizes, [64, 24, num_verified - 88]) == VerifySize(num_tokens, 64)
