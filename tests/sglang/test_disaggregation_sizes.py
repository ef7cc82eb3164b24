"""A prefill server of two ranks and a decode server of one, or the reverse, give the answers of
plain SGLang.

The second rank of a prefill server has a link half as fast as the first's, so that half of a page's
KV heads always arrive first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness.faults import fault_file_in
from harness.models import DEMO_MODEL
from harness.pair import Pair, PairSpec, running_pair, wait_until
from harness.pair_faults import (
    Round,
    assert_nothing_left,
    cut_in_use,
    register,
    registered,
    residuals_on_their_way,
)
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

from kvspec_testkit.transport.proxy import Proxy

# Servers of three ranks take more than a minute to start on two cores.
pytestmark = [pytest.mark.server, pytest.mark.identity]

FLAGS = ("--max-total-tokens=24576", "--chunked-prefill-size=512")
TWO_RANKS = "--tp-size=2"
# A second or two for the residuals of 1000 tokens, on the first rank's link.
JOINED = PairSpec(DEMO_MODEL, FLAGS, prefill=(TWO_RANKS, "--kvspec-link-gbps=0.006"))
FORKED = PairSpec(DEMO_MODEL, FLAGS, prefill=("--kvspec-link-gbps=0.003",), decode=(TWO_RANKS,))
WORKLOAD = RANKS_WORKLOAD
FAMILIES = False


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_file_in(tmp_path_factory.mktemp("faults"), SLOW_RANK)


@pytest.fixture(scope="module", params=[JOINED, FORKED], ids=["joined", "forked"])
def pair(
    request: pytest.FixtureRequest,
    reference: PlainReference,
    servers: ServerSwitch,
    fault_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    announce: Announce,
) -> Iterator[Pair]:
    servers.release()
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(with_faults(request.param, fault_file), folder, announce) as running:
        yield running


def test_servers_of_two_sizes_answer_like_one(pair: Pair, reference: PlainReference) -> None:
    answer_like_one(pair, reference)
    client = pair.client
    assert client.kvspec_report()["ranks"] + client.prefill.kvspec_report()["ranks"] == 3


def test_an_abort_while_residuals_are_on_their_way(pair: Pair, reference: PlainReference) -> None:
    abort_all(pair, reference)


@pytest.mark.parametrize("fault", ["lost_departure", "lost_residuals"])
def test_what_one_rank_gives_up_fails_as_a_whole(
    pair: Pair, reference: PlainReference, fault_file: Path, fault: str
) -> None:
    """Abort one request on one rank of the server that has two. The request fails as a whole, and
    the others are answered right. Only requests whose residuals take a while are sent."""
    is_prefills = fault == "lost_departure"
    if (pair.client.kvspec_report()["ranks"] == 1) is not is_prefills:
        pytest.skip("that server has one rank")
    tasks = [task for task in reference.suite.prompts if len(task.input_ids) > 500]
    fault_file.with_suffix(".fired").unlink(missing_ok=True)
    fault_file.write_text(f"{SLOW_RANK} {fault}")
    try:
        errors = Round(pair.client, tasks).finish(reference)
    finally:
        fault_file.write_text(SLOW_RANK)
    (error,) = errors
    assert "on purpose" in error or "another rank of" in error
    assert_nothing_left(pair.client)
    ask_all_at_once(pair, reference)


def test_links_to_one_rank_that_are_cut(pair: Pair, reference: PlainReference) -> None:
    """Cut the links to the last rank. Requests use another host name, for which the decode server
    opens other links."""
    rank = pair.client.prefill.kvspec_report()["ranks"] - 1
    direct = registered(pair, rank)
    proxy = Proxy(direct)
    register(pair, proxy.address, rank)
    try:
        client = pair.client_by("localhost")
        round_ = Round(client, reference.suite.prompts)
        wait_until(lambda: residuals_on_their_way(client), "residuals are on their way")
        cut_in_use(proxy, times=3)
        assert round_.finish(reference) == []
        assert proxy.num_connections > 3
    finally:
        register(pair, direct, rank)
        proxy.close()
    assert_nothing_left(pair.client)


IN_ROUNDS = ("--kvspec-schedule=rounds",)
IN_ONE_PIECE = (*FLAGS, "--kvspec-transfer=full")
SPECS = {
    "joined": JOINED,
    "joined-rounds": replace(JOINED, decode=IN_ROUNDS),
    "joined-full": replace(JOINED, arguments=IN_ONE_PIECE),
    "forked": FORKED,
    "forked-rounds": replace(FORKED, decode=(TWO_RANKS, *IN_ROUNDS)),
    "forked-full": replace(FORKED, arguments=IN_ONE_PIECE),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_requests_that_come_and_go(
    spec: PairSpec,
    reference: PlainReference,
    servers: ServerSwitch,
    fault_file: Path,
    tmp_path: Path,
    announce: Announce,
) -> None:
    answers = [(task, reference.answer(task)) for task in reference.suite.prompts]
    servers.release()
    come_and_go(with_faults(spec, fault_file), answers, reference, tmp_path, announce)
