"""Two ranks, each with tiers of its own below the prefix cache: what one of them lacks all compute
again, and answers are plain SGLang's."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.client import GenerateClient
from harness.comparison import compare
from harness.faults import fault_environment
from harness.models import DEMO_MODEL
from harness.prefix_folders import pages_on_disk, spoil
from harness.scenarios import STRICT_CHECKS
from harness.servers import Announce, ServerSpec, ServerSwitch
from harness.suite import Answers, Task, TokenIds, run_one_by_one

pytestmark = pytest.mark.server

# Less than half of the prompts, and host memory for some of the rest.
POOL = "--max-total-tokens=1536"
HOST = "--kvspec-prefix-host-gb=0.008"
NUM_TASKS, NUM_LATER = 4, 1
PAGE_SIZE = 64

Pairs = list[tuple[Task, TokenIds]]


@pytest.fixture(scope="module")
def expected(crowd_answers: Pairs) -> Pairs:
    """Long prompts that have no page in common, with plain SGLang's answers."""
    by_first_page: dict[TokenIds, tuple[Task, TokenIds]] = {}
    for pair in sorted(crowd_answers, key=lambda pair: -len(pair[0].input_ids)):
        by_first_page.setdefault(pair[0].input_ids[:PAGE_SIZE], pair)
    return list(by_first_page.values())[: NUM_TASKS + NUM_LATER]


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "active"
    path.write_text("none")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


def server(fault_file: Path, folder: Path, *more: str) -> ServerSpec:
    environment = STRICT_CHECKS.environment + fault_environment(KVSPEC_FAULT_FILE=fault_file)
    arguments = ("--kvspec", "--tp-size=2", POOL, HOST, f"--kvspec-prefix-dir={folder}", *more)
    return ServerSpec(DEMO_MODEL, arguments, environment)


def tasks_of(pairs: Pairs) -> list[Task]:
    return [task for task, _ in pairs]


def full_tokens(task: Task) -> int:
    """Those of a prompt that can be cached: its last token is computed."""
    return (len(task.input_ids) - 1) // PAGE_SIZE * PAGE_SIZE


def check(answers: Answers, expected: Pairs) -> Counter[str]:
    """Tokens hit, by tier."""
    mismatches = compare(answers, [tokens for _, tokens in expected])
    assert not mismatches, "\n".join(map(str, mismatches))
    for _, output in answers:
        assert sum(output.hit_tokens.values()) == output.cached_len
    return sum((Counter(output.hit_tokens) for _, output in answers), Counter())


def ask(client: GenerateClient, pairs: Pairs) -> tuple[Counter[str], list[dict[str, int]]]:
    """Tokens hit by all and by each, one request at a time."""
    answers = run_one_by_one(client, tasks_of(pairs), lambda: None)
    return check(answers, pairs), [output.hit_tokens for _, output in answers]


def ask_all_at_once(client: GenerateClient, pairs: Pairs) -> Counter[str]:
    """Tokens hit."""
    with ThreadPoolExecutor(len(pairs)) as pool:
        answers = pool.map(
            lambda task: client.generate(task.input_ids, task.max_new_tokens), tasks_of(pairs)
        )
        return check(list(zip(tasks_of(pairs), answers, strict=True)), pairs)


def wait_until_spilled(client: GenerateClient, folder: Path, is_same: bool = True) -> list[int]:
    """Pages on disk by rank, once nothing is on its way there. is_same: on all ranks."""
    while client.kvspec_report()["prefix_tiers"]["disk"]["waiting_bytes"]:
        pass
    while True:
        pages = pages_on_disk(folder)
        if not is_same or len(set(pages)) == 1:
            return pages


def test_what_one_rank_lacks_no_rank_uses(
    servers: ServerSwitch, expected: Pairs, fault_file: Path, folder: Path, announce: Announce
) -> None:
    client = servers.use(server(fault_file, folder))
    first, later = expected[:NUM_TASKS], expected[NUM_TASKS:]
    assert not ask(client, first)[0]
    pages = wait_until_spilled(client, folder)
    assert len(pages) == 2
    hits, each = ask(client, first)
    assert [sum(tiers.values()) for tiers in each] == [full_tokens(task) for task, _ in first]
    assert min(hits["host"], hits["disk"]) >= PAGE_SIZE

    # The third page of the first prompt, of the other rank's heads alone.
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
    # Finished again, the other rank keeps them, too.
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
