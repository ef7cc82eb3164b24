"""A prefill and a decode server of two ranks each give the answers of plain SGLang.

The second rank's link is half as fast as the first's, so that on the decode server KV always
arrives on one rank first. A fault on one rank must fail the request on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness.faults import fault_file_in
from harness.models import DEMO_MODEL
from harness.pair import Pair, PairSpec, running_pair
from harness.pair_faults import Round, assert_nothing_left
from harness.pair_ranks import (
    RANKS_WORKLOAD,
    SLOW_RANK,
    abort_all,
    answer_like_one,
    ask_all_at_once,
    come_and_go,
    with_faults,
)
from harness.references import PlainReference
from harness.servers import Announce, ServerSwitch

# Two servers of two ranks take two minutes to start on two cores.
pytestmark = [pytest.mark.server, pytest.mark.identity]

# About a second for the residuals of 1000 tokens, on the first rank's link.
FLAGS = ("--max-total-tokens=24576", "--chunked-prefill-size=512", "--tp-size=2")
SLOW_LINK = "--kvspec-link-gbps=0.006"
SPEC = PairSpec(DEMO_MODEL, FLAGS, prefill=(SLOW_LINK,))
WORKLOAD = RANKS_WORKLOAD
FAMILIES = False


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_file_in(tmp_path_factory.mktemp("faults"), SLOW_RANK)


@pytest.fixture(scope="module")
def pair(
    reference: PlainReference,
    servers: ServerSwitch,
    fault_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    announce: Announce,
) -> Iterator[Pair]:
    servers.release()
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(with_faults(SPEC, fault_file), folder, announce) as running:
        yield running


def test_two_ranks_answer_like_one(pair: Pair, reference: PlainReference) -> None:
    answer_like_one(pair, reference)
    client = pair.client
    assert client.kvspec_report()["ranks"] == client.prefill.kvspec_report()["ranks"] == 2


def test_an_abort_while_residuals_are_on_their_way(pair: Pair, reference: PlainReference) -> None:
    abort_all(pair, reference)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("lost_residuals", "another rank of this server failed to receive its part"),
        ("lost_anchors", "another rank of this server cancelled the request"),
        # Either server may report this first.
        ("lost_departure", "another rank of"),
    ],
)
def test_all_ranks_abort_a_transfer_that_one_rank_lost(
    pair: Pair, reference: PlainReference, fault_file: Path, fault: str, reason: str
) -> None:
    """Lose one request on one rank. Both ranks must fail it, and answer the others right."""
    fault_file.with_suffix(".fired").unlink(missing_ok=True)
    fault_file.write_text(f"{SLOW_RANK} {fault}")
    try:
        errors = Round(pair.client, reference.suite.prompts).finish(reference)
    finally:
        fault_file.write_text(SLOW_RANK)
    (error,) = errors
    assert reason in error
    assert_nothing_left(pair.client)
    ask_all_at_once(pair, reference)


def test_a_decode_server_of_another_size_in_its_place(
    pair: Pair, reference: PlainReference
) -> None:
    """Replace the decode server by one of another size; test_disaggregation_sizes.py has more such
    cases."""
    pair.restart_decode("--tp-size=1")
    ask_all_at_once(pair, reference)
    pair.restart_decode()
    ask_all_at_once(pair, reference)


ROUNDS = replace(SPEC, decode=("--kvspec-schedule=rounds",))
IN_ONE_PIECE = replace(SPEC, arguments=(*FLAGS, "--kvspec-transfer=full"))


# With a residual cache that holds a part of the residuals, the plan of verifications depends on its
# content.
@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (SPEC, {"KVSPEC_CACHE_PAGES": 20}),
        (ROUNDS, {}),
        (ROUNDS, {"KVSPEC_CACHE_PAGES": 20}),
        (IN_ONE_PIECE, {}),
    ],
    ids=["staggered-cache", "rounds", "rounds-cache", "in-one-piece"],
)
def test_requests_that_come_and_go(
    spec: PairSpec,
    settings: dict[str, object],
    reference: PlainReference,
    servers: ServerSwitch,
    fault_file: Path,
    tmp_path: Path,
    announce: Announce,
) -> None:
    answers = [(task, reference.answer(task)) for task in reference.suite.prompts]
    servers.release()
    come_and_go(with_faults(spec, fault_file, **settings), answers, reference, tmp_path, announce)
