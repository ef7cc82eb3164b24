"""Two ranks answer like two ranks without drafts, also if one of them errs."""

from __future__ import annotations

import pytest
from fleet import Fleet
from live_server import Answers

pytestmark = pytest.mark.two_ranks


@pytest.fixture(scope="module")
def expected_of_ranks(fleet: Fleet, prompts: list[list[int]], new_tokens: int) -> Answers:
    """Answers of two ranks without drafts. Sums over two ranks differ from sums on one."""
    return fleet["ranks off"].ask(prompts, new_tokens, at_once=False)


@pytest.mark.servers("ranks off", "ranks")
def test_plain_steps_do_not_depend_on_what_runs_beside(
    fleet: Fleet, prompts: list[list[int]], new_tokens: int, expected_of_ranks: Answers
) -> None:
    """All-reduces sum in one order."""
    fleet["ranks off"].flush()
    found = fleet["ranks off"].ask(prompts, new_tokens, at_once=True)
    assert found == expected_of_ranks


@pytest.mark.parametrize("fault", ["none", "ranks_differ"])
@pytest.mark.parametrize("at_once", [False, True], ids=["one at a time", "at once"])
def test_same_as_without_drafts(
    fleet: Fleet,
    fault: str,
    at_once: bool,
    prompts: list[list[int]],
    new_tokens: int,
    expected_of_ranks: Answers,
) -> None:
    """With the fault, every rank but the first chooses other tokens and draft lengths. All ranks
    must use what the first one broadcasts."""
    server = fleet["ranks"]
    fired = fleet.fault_file.with_suffix(".fired")
    fired.unlink(missing_ok=True)
    fleet.fault_file.write_text(fault)
    try:
        assert server.ask(prompts, new_tokens, at_once=at_once) == expected_of_ranks
    finally:
        fleet.fault_file.write_text("none")
    assert fired.exists() == (fault != "none")
    assert server.report()["ranks"] == 2


@pytest.mark.servers("ranks ngram")
@pytest.mark.parametrize("at_once", [False, True], ids=["one at a time", "at once"])
def test_same_with_proposals_of_ngrams(
    fleet: Fleet,
    at_once: bool,
    prompts: list[list[int]],
    new_tokens: int,
    expected_of_ranks: Answers,
) -> None:
    server = fleet["ranks ngram"]
    assert server.ask(prompts, new_tokens, at_once=at_once) == expected_of_ranks
    assert server.report()["ngram"]["kept"] > 0


def test_a_seed_gives_the_same_text(
    fleet: Fleet, prompts: list[list[int]], new_tokens: int
) -> None:
    params = {"temperature": 0.8, "max_new_tokens": new_tokens, "ignore_eos": True}
    bodies = [
        {"input_ids": prompt, "sampling_params": {**params, "sampling_seed": seed}}
        for seed, prompt in enumerate(prompts)
    ]
    found, wanted = (
        [answer["output_ids"] for answer in fleet[name].send(bodies)]
        for name in ("ranks", "ranks off")
    )
    assert found == wanted


def test_over_cached_prefixes(
    fleet: Fleet, prompts: list[list[int]], new_tokens: int, expected_of_ranks: Answers
) -> None:
    server = fleet["ranks"]
    before = server.hits["resident"]
    asked = prompts[-2:] * 2
    assert server.ask(asked, new_tokens, at_once=False) == expected_of_ranks[-2:] * 2
    assert server.hits["resident"] > before


@pytest.mark.servers("ranks tiers")
def test_tiers_of_ranks_that_drift(
    fleet: Fleet, prompts: list[list[int]], new_tokens: int, expected_of_ranks: Answers
) -> None:
    """Tiers of the second rank refuse one page of eight, and lose one of eight. Ranks must agree
    on the pages that both have."""
    server = fleet["ranks tiers"]
    fired = fleet.fault_file.with_suffix(".fired")
    fired.unlink(missing_ok=True)
    fleet.fault_file.write_text("tiers_drift")
    try:
        for at_once in (False, False, True):
            assert server.ask(prompts, new_tokens, at_once=at_once) == expected_of_ranks
            server.wait_until_spilled()
    finally:
        fleet.fault_file.write_text("none")
    assert fired.exists(), "no rank missed a page"
    assert server.hits["host"] > 0
