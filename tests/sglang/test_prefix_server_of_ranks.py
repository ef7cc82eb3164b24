"""Two ranks are two clients of a prefix server. A page that arrives on one rank alone is used by
neither, and answers are plain SGLang's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.client import GenerateClient
from harness.faults import fault_environment
from harness.models import DEMO_MODEL
from harness.prefix_folders import pages_on_disk
from harness.prefix_hits import Pairs, ask, ask_all_at_once, full_tokens, longest_apart
from harness.scenarios import STRICT_CHECKS
from harness.servers import Announce, ServerSpec, ServerSwitch

from kvspec_testkit.servers.prefix_server_process import PrefixServerProcess

pytestmark = [pytest.mark.server, pytest.mark.identity]

# A long limit for busy machines. Requests wait that long in vain only once.
WAIT = "--kvspec-prefix-wait-ms=20000"
NUM_TASKS = 6


@pytest.fixture(scope="module")
def expected(crowd_answers: Pairs) -> Pairs:
    """Prompts with plain SGLang's answers."""
    return longest_apart(crowd_answers, NUM_TASKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[PrefixServerProcess]:
    with PrefixServerProcess(folder) as store:
        yield store


def report_of(client: GenerateClient) -> dict[str, Any]:
    return dict(client.kvspec_report()["prefix_tiers"]["remote"])


def wait_until_found(client: GenerateClient, pairs: Pairs) -> None:
    """Wait until both ranks have a link, shown by a hit: /server_info does not report the second
    rank's."""
    hits: Counter[str] = Counter()
    while not hits["remote"]:
        client.flush_cache()
        hits = ask(client, pairs[:1])[0]
    client.flush_cache()


def test_two_ranks_find_what_two_others_computed(
    servers: ServerSwitch,
    store: PrefixServerProcess,
    folder: Path,
    tmp_path: Path,
    expected: Pairs,
    announce: Announce,
) -> None:
    fault_file = tmp_path / "active"
    fault_file.write_text("none")
    spec = ServerSpec(
        DEMO_MODEL,
        (
            *("--kvspec", "--tp-size=2", "--max-total-tokens=8192", WAIT),
            f"--kvspec-prefix-server={store.address}",
        ),
        STRICT_CHECKS.environment + fault_environment(KVSPEC_FAULT_FILE=fault_file),
    )
    client = servers.use(spec)
    ask(client, expected)
    num_pages = sum(full_tokens(task) for task, _ in expected) // 64
    while min(pages := pages_on_disk(folder), default=0) < num_pages or len(pages) < 2:
        # A rank that had no link when the prompts finished publishes them this time.
        ask(client, expected)
    servers.kill()

    fresh = servers.use(spec)
    wait_until_found(fresh, expected)
    hits = ask_all_at_once(fresh, expected)
    announce(f"prefix server of two ranks: {pages} pages, hits {dict(hits)}")
    assert hits["remote"] == 64 * num_pages

    fault_file.write_text("remote_fails_on_other_ranks")
    fresh.flush_cache()
    assert not ask(fresh, expected)[0]
    assert fault_file.with_suffix(".fired").exists()

    fault_file.write_text("other_ranks_distrust")
    fresh.flush_cache()
    before = report_of(fresh)["counters"]
    assert not ask(fresh, expected)[0]
    after = report_of(fresh)["counters"]
    assert after["lookups"] == before["lookups"]
    assert after["unasked"] == before["unasked"] + len(expected)

    fault_file.write_text("none")
    fresh.flush_cache()
    store.stall()
    assert not ask_all_at_once(fresh, expected)
    store.kill()
    fresh.flush_cache()
    assert not ask(fresh, expected)[0]
    store.start()
    wait_until_found(fresh, expected)
    assert ask(fresh, expected)[0]["remote"] == 64 * num_pages
