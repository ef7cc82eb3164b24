"""Ranks with different tiers find, load and wait for the same pages. Each rank is a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("prefix_rank_process.py")
SIZE = 2


@pytest.fixture(scope="module")
def results(run_ranks) -> list[dict[str, Any]]:
    """Results of each rank."""
    return run_ranks(SCRIPT, SIZE)


def of_case(results: list[dict[str, Any]], case: str) -> Any:
    """Return the result of a case, and check that it is the same on all ranks."""
    first, *others = (result[case] for result in results)
    assert others == [first] * (SIZE - 1), "ranks differ"
    return first


def loaded(num_pages: int, from_disk: int, num_asked: int) -> dict[str, Any]:
    """Return the expected result: this many right pages, and the others free."""
    return {
        "loaded": [num_pages, from_disk, 0, 0, 0],
        "are_right": True,
        "free": num_asked - num_pages,
    }


def test_a_prefix_ends_where_one_rank_has_no_more(results) -> None:
    found = of_case(results, "lookups")
    assert found["nums"] == [3, 0, 2, 0, 2]
    # One message is sent for all prefixes, and none if there is nothing to ask for.
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
    # The first residual of the second rank was in host memory. The report names the slower tier of
    # both ranks for each page.
    assert found["first"] == loaded(5, 4, num_asked=18)
    assert found["second"] == loaded(17, 17, num_asked=18)
    least, most = found["damaged"]
    assert (least, -most) == (0, 1), "one rank alone was to find it"


def test_requests_wait_for_the_last_rank(results) -> None:
    found = of_case(results, "waits")
    # Each request asks from the first page on that one rank lacks.
    assert found["asked"] == {
        "a": [3, True],
        "b": [0, True],
        "c": [2, True],
        "d": [3, True],
        "none": [0, True],
    }
    assert found["awaited"] == [["a", "b", "c"], ["c"], []]
    # One message to ask, and one for each check while a request waits.
    assert found["messages"] == [4, 0]


def test_an_open_circuit_breaker_of_one_rank_stops_all_ranks_from_asking(results) -> None:
    assert of_case(results, "waits")["distrusted"] == [3, False]


def test_a_request_is_anchored_where_it_is_on_every_rank(results) -> None:
    found = of_case(results, "anchors")
    assert found["anchored"] == [["b"], [], []]
    assert found["messages"] == [3, 0]


def test_ranks_that_look_up_different_prefixes_stop(results) -> None:
    for rank, result in enumerate(results):
        for refusal in result["out_of_step"]:
            assert f"rank {rank} of 2 is out of step with another rank" in refusal
