"""Ranks whose tiers differ find, load and wait for the same: two processes, each with its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("prefix_rank_process.py")
SIZE = 2


@pytest.fixture(scope="module")
def results(run_ranks) -> list[dict[str, Any]]:
    """What each rank has come to."""
    return run_ranks(SCRIPT, SIZE)


def of_case(results: list[dict[str, Any]], case: str) -> Any:
    """What all ranks have come to."""
    first, *others = (result[case] for result in results)
    assert others == [first] * (SIZE - 1), "ranks differ"
    return first


def loaded(num_pages: int, from_disk: int, num_asked: int) -> dict[str, Any]:
    """As many pages as said, right, and the others free on all ranks."""
    return {
        "loaded": [num_pages, from_disk, 0, 0, 0],
        "are_right": True,
        "free": num_asked - num_pages,
    }


def test_a_prefix_ends_where_one_rank_has_no_more(results) -> None:
    found = of_case(results, "lookups")
    assert found["nums"] == [3, 0, 2, 0, 2]
    # One message for all prefixes, and none where there is nothing to ask for.
    assert found["messages"] == [1, 0]
    assert found["nothing"] == [0, 0]


def test_what_one_rank_has_not_loaded_is_free_on_all(results) -> None:
    found = of_case(results, "lookups")
    assert found["long"] == loaded(3, 0, num_asked=5)
    assert found["other"] == loaded(2, 0, num_asked=2)
    assert found["unknown"] == loaded(0, 0, num_asked=1)


def test_a_page_damaged_on_one_rank_is_lost_to_all(results) -> None:
    found = of_case(results, "damages")
    assert found["promised"] == [18, 5]
    # The first residual of the second rank was in host memory; a page is from where the farthest
    # rank had it.
    assert found["first"] == loaded(5, 4, num_asked=18)
    assert found["second"] == loaded(17, 17, num_asked=18)
    least, most = found["damaged"]
    assert (least, -most) == (0, 1), "one rank alone was to find it"


def test_requests_wait_for_the_last_rank(results) -> None:
    found = of_case(results, "waits")
    # From the first page on that one rank lacks.
    assert found["asked"] == {
        "a": [3, True],
        "b": [0, True],
        "c": [2, True],
        "d": [3, True],
        "none": [0, True],
    }
    assert found["awaited"] == [["a", "b", "c"], ["c"], []]
    # One to ask, and one for each time that somebody waits still.
    assert found["messages"] == [4, 0]


def test_where_one_rank_has_no_trust_nobody_asks(results) -> None:
    assert of_case(results, "waits")["distrusted"] == [3, False]


def test_a_request_is_anchored_where_it_is_on_every_rank(results) -> None:
    found = of_case(results, "anchors")
    assert found["anchored"] == [["b"], [], []]
    assert found["messages"] == [3, 0]


def test_ranks_that_look_up_different_prefixes_stop(results) -> None:
    for rank, result in enumerate(results):
        for refusal in result["apart"]:
            assert f"rank {rank} of 2 no longer serves what the others serve" in refusal
