"""A prefill server finds prefixes of prompts on a prefix server, where another prefill server has
published them, and sends them to the decode server. The run takes minutes, which CI does not
have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness.arrival import run_staggered
from harness.models import DEMO_MODEL
from harness.pair import Pair, PairSpec, running_pair, wait_until
from harness.pair_faults import assert_nothing_left
from harness.references import PlainReference, Workload
from harness.scenarios import STRICT_CHECKS
from harness.servers import Announce, ServerSwitch
from harness.suite import run_one_by_one

from kvspec_testkit.servers.prefix_server_process import PrefixServerProcess

pytestmark = [pytest.mark.server, pytest.mark.identity]

PAGE_SIZE = 64
# Full pages and a rest; one full page more than SGLang may take from a cache; less than a page.
LENGTHS = (40, 640, 1000, 1001, 1500, 2048)
WORKLOAD = Workload(DEMO_MODEL, LENGTHS, max_new_tokens=64)
FAMILIES = False


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def num_ranks(request: pytest.FixtureRequest) -> int:
    """Number of ranks of each server."""
    return int(request.param)


@pytest.fixture(scope="module")
def store(
    num_ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefixServerProcess]:
    """Prefix server of this pair alone."""
    with PrefixServerProcess(tmp_path_factory.mktemp("prefixes")) as store:
        yield store


@pytest.fixture(scope="module")
def pair(
    num_ranks: int,
    servers: ServerSwitch,
    store: PrefixServerProcess,
    reference: PlainReference,
    tmp_path_factory: pytest.TempPathFactory,
    announce: Announce,
) -> Iterator[Pair]:
    """Two servers with a slow link, so that residuals arrive late."""
    servers.release()
    spec = PairSpec(
        DEMO_MODEL,
        (
            "--max-total-tokens=8192",
            "--max-running-requests=8",
            "--mem-fraction-static=0.3",
            f"--tp-size={num_ranks}",
        ),
        prefill=(
            f"--kvspec-prefix-server={store.address}",
            "--kvspec-prefix-wait-ms=20000",
            "--kvspec-link-gbps=0.006",
        ),
        environment=dict(STRICT_CHECKS.environment),
    )
    with running_pair(spec, tmp_path_factory.mktemp("pair"), announce) as running:
        yield running


def remote_of(pair: Pair) -> dict[str, Any]:
    return dict(pair.client.prefill.kvspec_report()["prefix_tiers"]["remote"])


def test_what_one_prefill_server_computed_another_finds(
    pair: Pair, store: PrefixServerProcess, reference: PlainReference
) -> None:
    tasks = reference.suite.prompts
    wait_until(lambda: remote_of(pair)["is_live"], "a link to the prefix server")
    reference.check(run_one_by_one(pair.client, tasks, lambda: None))
    wait_until(lambda: not remote_of(pair)["waiting_bytes"], "pages published")
    full = sum((length - 1) // PAGE_SIZE for length in LENGTHS)
    assert remote_of(pair)["counters"]["pages_published"] >= full
    pair.restart_prefill()
    wait_until(lambda: remote_of(pair)["is_live"], "a link to the prefix server")
    reference.check(run_staggered(pair.client, tasks, lambda: None))
    hits = pair.client.prefill.kvspec_report()["counters"]["hit_tokens"]
    assert hits["remote"] == full * PAGE_SIZE
    assert hits["resident"] == hits["host"] == hits["disk"] == 0
    assert_nothing_left(pair.client)
    # Without the store, prompts are computed.
    store.kill()
    wait_until(lambda: not remote_of(pair)["is_live"], "the store's death noticed")
    reference.check(run_staggered(pair.client, tasks, lambda: None))
    assert pair.client.prefill.kvspec_report()["counters"]["hit_tokens"] == hits
    assert_nothing_left(pair.client)
