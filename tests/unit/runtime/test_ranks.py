"""Ranks decide together: two processes whose own choices differ emit the same tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_kvspec.runtime.ranks import Ranks, broadcast_tokens
from sglang_kvspec.runtime.spec_sampler import VerifyResult

SCRIPT = Path(__file__).with_name("rank_process.py")
SIZE = 2


@pytest.fixture(scope="module")
def results(run_ranks) -> list[dict[str, Any]]:
    """Results of each rank."""
    return run_ranks(SCRIPT, SIZE)


def test_every_rank_gets_the_same_message(results) -> None:
    expected = {
        "numbers": [1, 2],
        "no_numbers": [],
        "least": [0, -95, 7],
        "no_least": [],
        "gather": [[0, -1 << 63], [100, -1 << 63]],
        "runs": [[0], [0], []],
        "tensor": [[0, 1, 2], [4, 5, 6]],
    }
    assert [result["messages"] for result in results] == [expected] * SIZE


def test_all_ranks_emit_what_the_first_would_alone(results) -> None:
    first = results[0]["alone"]
    assert [result["together"] for result in results] == [first] * SIZE
    for kind in ("greedy", "seeded", "unseeded"):
        others = [result["alone"][kind] for result in results[1:]]
        assert first[kind] not in others, f"{kind}: without messages ranks were to differ"


def test_all_ranks_get_the_run_of_drafts_of_the_first(results) -> None:
    first = results[0]["runs_alone"]
    assert [result["runs_together"] for result in results] == [first] * SIZE
    lengths = [[len(drafts) for drafts, _ in result["runs_alone"]["greedy"]] for result in results]
    assert lengths == [[2, 3], [3, 2]], "without messages ranks were to differ"
    for drafts, num_probs in results[1]["runs_together"]["unseeded"]:
        assert num_probs == len(drafts)


def test_ranks_that_serve_different_requests_stop(results) -> None:
    *sent, of_all = results[0]["out_of_order"]
    assert sent == ["", ""], "the first rank asks no other rank"
    assert "rank 0 of 2 is out of step with another rank" in of_all
    other_request, too_few, of_all = results[1]["out_of_order"]
    assert "rank 1 of 2 is out of step with another rank" in of_all
    assert "rank 1 of 2 is out of step with rank 0" in other_request
    assert "('request', 1)" in other_request
    assert "expected 2 numbers about same and received 1" in too_few


def test_a_rank_alone_keeps_its_own_choices() -> None:
    ranks = Ranks()
    grid = torch.arange(6).reshape(2, 3)
    assert ranks.is_first
    assert ranks.numbers((4, 5), about="this") == [4, 5]
    assert ranks.least((4, 5), about="this") == [4, 5]
    assert ranks.gather((4, 5), about="this") == [[4, 5]]
    assert ranks.runs([(1,), ()], [1, 1], about="this") == [[1], []]
    assert ranks.tensor(grid) is grid
    verified = VerifyResult([7, 8], torch.zeros(2, 9))
    state = SimpleNamespace(rid="r", drafts=[3], next_position=5)
    assert broadcast_tokens(ranks, [state, state], [verified, None]) == [verified, None]
    assert state.drafts == [3]
