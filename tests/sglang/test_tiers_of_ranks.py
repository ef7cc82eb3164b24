"""Two ranks, each with tiers of its own below the prefix cache. A page that one rank lacks is
computed by both, and answers are plain SGLang's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from harness.client import GenerateClient
from harness.faults import fault_environment, fault_file_in
from harness.models import DEMO_MODEL
from harness.prefix_folders import pages_on_disk, spoil
from harness.prefix_hits import (
    PAGE_SIZE,
    Pairs,
    ask,
    ask_all_at_once,
    full_tokens,
    longest_apart,
)
from harness.scenarios import FORCED_RETRACTION, STRICT_CHECKS
from harness.servers import Announce, ServerSpec, ServerSwitch

pytestmark = [pytest.mark.server, pytest.mark.identity]

# A pool for less than half of the prompts, and host memory for some of the rest.
POOL = "--max-total-tokens=1536"
HOST = "--kvspec-prefix-host-gb=0.008"
NUM_TASKS, NUM_LATER = 4, 1
NUM_CROWD = 12


@pytest.fixture(scope="module")
def expected(crowd_answers: Pairs) -> Pairs:
    """Prompts with plain SGLang's answers."""
    return longest_apart(crowd_answers, NUM_TASKS + NUM_LATER)


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_file_in(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


def server(fault_file: Path, folder: Path, *flags: str) -> ServerSpec:
    environment = STRICT_CHECKS.environment + fault_environment(KVSPEC_FAULT_FILE=fault_file)
    arguments = ("--kvspec", "--tp-size=2", f"--kvspec-prefix-dir={folder}", *flags)
    return ServerSpec(DEMO_MODEL, arguments, environment)


def wait_until_spilled(client: GenerateClient, folder: Path, is_same: bool = True) -> list[int]:
    """Return the pages on disk by rank, once no writes are pending. is_same: wait until all ranks
    have as many."""
    while client.kvspec_report()["prefix_tiers"]["disk"]["waiting_bytes"]:
        pass
    while True:
        pages = pages_on_disk(folder)
        if not is_same or len(set(pages)) == 1:
            return pages


def test_what_one_rank_lacks_no_rank_uses(
    servers: ServerSwitch, expected: Pairs, fault_file: Path, folder: Path, announce: Announce
) -> None:
    client = servers.use(server(fault_file, folder, POOL, HOST))
    first, later = expected[:NUM_TASKS], expected[NUM_TASKS:]
    assert not ask(client, first)[0]
    pages = wait_until_spilled(client, folder)
    assert len(pages) == 2
    hits, each = ask(client, first)
    assert [sum(tiers.values()) for tiers in each] == [full_tokens(task) for task, _ in first]
    assert min(hits["host"], hits["disk"]) >= PAGE_SIZE

    # Damage the third page of the first prompt, for the other rank's heads alone.
    spoil(folder, "residuals.data", 2, rank=1)
    client.flush_cache()
    _, each = ask(client, first)
    rest = [full_tokens(task) for task, _ in first[1:]]
    assert [tiers["disk"] for tiers in each] == [2 * PAGE_SIZE, *rest]
    counters = client.kvspec_report()["prefix_tiers"]["disk"]["counters"]
    assert counters["damaged_residuals"] == counters["damaged_anchors"] == 0, "of the first rank"

    fault_file.write_text("disk_refuses_on_other_ranks")
    assert not ask(client, later)[0]
    mine, others = wait_until_spilled(client, folder, is_same=False)
    assert mine > others == pages[1]
    client.flush_cache()
    assert not ask(client, later)[0]
    fault_file.write_text("none")
    # The other rank stores the pages when the prompts finish again.
    ask(client, later)
    assert wait_until_spilled(client, folder) == [mine, mine]
    client.flush_cache()
    _, each = ask(client, later)
    assert [tiers["disk"] for tiers in each] == [full_tokens(task) for task, _ in later]

    fault_file.write_text("tiers_drift")
    hits = ask_all_at_once(client, expected)
    client.flush_cache()
    hits += ask(client, expected)[0]
    announce(f"ranks that drift: hits {dict(hits)}")
    assert fault_file.with_suffix(".fired").exists()
    fault_file.write_text("none")
    client.flush_cache()
    report = client.kvspec_report()
    assert report["pools"]["num_pages_allocated"] == report["pools"]["window_pages_used"] == 0
    assert report["page_states"]["ABSENT"] == report["pools"]["num_pages"] + 1


@pytest.mark.parametrize("schedule", ["staggered", "rounds"])
def test_plain_answers_under_pressure_and_after_restarts(
    servers: ServerSwitch,
    crowd_answers: Pairs,
    fault_file: Path,
    tmp_path: Path,
    announce: Announce,
    schedule: str,
) -> None:
    """Send prompts all at once, with retractions, in a pool that holds a part of them. The tiers of
    one rank refuse or lose one page in eight."""
    expected = sorted(crowd_answers, key=lambda pair: -len(pair[0].input_ids))[:NUM_CROWD]
    fault_file.write_text("tiers_drift")
    spec = FORCED_RETRACTION.server(
        server(
            fault_file,
            tmp_path,
            f"--kvspec-schedule={schedule}",
            "--max-total-tokens=4096",
            "--kvspec-prefix-host-gb=0.03",
            "--kvspec-prefix-hbm-fraction=0.002",
        )
    )
    hits: Counter[str] = Counter()
    for how in ("cold", "again", "restarted", "killed"):
        client = servers.use(spec)
        hits += ask_all_at_once(client, expected)
        hits += ask(client, expected)[0]
        announce(f"{schedule}, {how}: {dict(hits)} tokens hit so far")
        if how == "again":
            servers.release()
        elif how == "restarted":
            servers.kill()
    fault_file.write_text("none")
    assert min(hits[tier] for tier in ("resident", "host", "disk")) > 1000
