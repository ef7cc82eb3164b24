"""Eighty prompts from prefix tiers, a prefix server and a link, with residuals as they are and
packed. The run takes minutes, which CI does not have.

Servers with both forms answer the same requests one by one, so that all forwards have equal shapes:
the packed form needs a KV cache in bf16, where near-ties flip with the shape of a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.client import GenerateClient
from harness.comparison import compare
from harness.identity_report import IdentityReport, ScenarioResult
from harness.models import DEMO_MODEL
from harness.pair import PairSpec, running_pair, wait_until, wait_until_stored
from harness.progress import Progress
from harness.prompts import cut_prompts
from harness.servers import Announce, ServerSpec, ServerSwitch
from harness.shard import WHOLE
from harness.suite import Answers, run_one_by_one, tasks_of

from kvspec_testkit.servers.prefix_server_process import PrefixServerProcess

pytestmark = [pytest.mark.server, pytest.mark.identity]

NEW_TOKENS = 24
LENGTHS = tuple(128 + 23 * place for place in range(80))
BASE = ("--dtype=bfloat16", "--kvspec", "--kvspec-draft-len=4")
# Less than the prompts together, so that prefixes leave the KV cache.
SMALL_POOL = "--max-total-tokens=2560"
# A long limit for busy machines. Requests wait that long in vain only once.
WAIT = "--kvspec-prefix-wait-ms=20000"

# Answers, and the seconds that they took.
Timed = tuple[Answers, float]
# Those of one form by scenario.
Found = dict[str, Timed]
Ask = Callable[[str, GenerateClient], Timed]
Check = Callable[[dict[str, Found]], None]


@pytest.fixture(scope="module")
def bf16_report(request: pytest.FixtureRequest) -> IdentityReport:
    settings = {"device": "cpu", "dtype": "bfloat16", "temperature": 0}
    return IdentityReport(
        request.config.getoption("--packed-report"), settings=settings, shard=WHOLE
    )


@pytest.fixture
def ask(announce: Announce) -> Ask:
    """Function that returns a server's answers to all prompts, one by one."""
    tasks = tasks_of(cut_prompts(DEMO_MODEL, LENGTHS), NEW_TOKENS)

    def ask_all(label: str, client: GenerateClient) -> Timed:
        progress = Progress(label, announce)
        return run_one_by_one(client, tasks, progress.done), progress.elapsed_s

    return ask_all


@pytest.fixture
def check(bf16_report: IdentityReport, announce: Announce) -> Check:
    """Function that compares the answers of both forms, and reports them."""

    def check_all(found: dict[str, Found]) -> None:
        differ = []
        for scenario, (answers, elapsed_s) in found["packed"].items():
            expected = [output.output_ids for _, output in found["raw"][scenario][0]]
            mismatches = compare(answers, expected)
            bf16_report.add(
                ScenarioResult(
                    model=DEMO_MODEL.name,
                    setting="packed",
                    scenario=scenario,
                    baseline="the same servers with raw residuals",
                    num_prompts=len(answers),
                    num_answers=len(answers),
                    num_retractions=sum(output.num_retractions for _, output in answers),
                    mismatches=tuple(mismatches),
                    elapsed_s=elapsed_s,
                )
            )
            announce(f"{scenario}: {len(mismatches)} of {len(answers)} answers differ")
            differ += mismatches
        assert not differ, "\n".join(map(str, differ))

    return check_all


def forms() -> Iterator[tuple[str, str]]:
    """Yield each form, and its flag."""
    for form in ("raw", "packed"):
        yield form, f"--kvspec-exact-residual={form}"


def test_tiers(servers: ServerSwitch, tmp_path: Path, ask: Ask, check: Check) -> None:
    """Prompts are computed, come back from host memory and disk, and from the disk of a server
    that ended."""
    found: dict[str, Found] = {}
    for form, flag in forms():
        folder = f"--kvspec-prefix-dir={tmp_path / form}"
        spec = ServerSpec(
            DEMO_MODEL, (*BASE, SMALL_POOL, "--kvspec-prefix-host-gb=0.02", folder, flag)
        )
        client = servers.use(spec)
        answers = {"computed": ask(f"{form} computed", client)}
        wait_until_stored(client, "disk")
        answers["host and disk"] = ask(f"{form} from tiers", client)
        servers.release()
        fresh = servers.use(spec)
        answers["disk"] = ask(f"{form} from disk", fresh)
        assert fresh.kvspec_report()["counters"]["hit_tokens"]["disk"] > 0
        servers.release()
        found[form] = answers
    check(found)


def use_live(servers: ServerSwitch, spec: ServerSpec) -> GenerateClient:
    """Return a client of a server that has reached its prefix server."""
    client = servers.use(spec)
    wait_until(
        lambda: client.kvspec_report()["prefix_tiers"]["remote"]["is_live"],
        "the prefix server did not answer",
    )
    return client


def test_a_prefix_server(servers: ServerSwitch, tmp_path: Path, ask: Ask, check: Check) -> None:
    found: dict[str, Found] = {}
    for form, flag in forms():
        (tmp_path / form).mkdir()
        with PrefixServerProcess(tmp_path / form) as store:
            address = f"--kvspec-prefix-server={store.address}"
            spec = ServerSpec(DEMO_MODEL, (*BASE, "--max-total-tokens=8192", WAIT, address, flag))

            client = use_live(servers, spec)
            ask(f"{form} published", client)
            wait_until_stored(client, "remote")
            servers.release()
            fresh = use_live(servers, spec)
            found[form] = {"prefix server": ask(f"{form} from a prefix server", fresh)}
            assert fresh.kvspec_report()["counters"]["hit_tokens"]["remote"] > 0
            servers.release()
    check(found)


def test_a_link(
    servers: ServerSwitch, tmp_path: Path, announce: Announce, ask: Ask, check: Check
) -> None:
    """Without drafts, when residuals arrive does not matter."""
    servers.release()
    found: dict[str, Found] = {}
    for form, flag in forms():
        spec = PairSpec(
            DEMO_MODEL,
            ("--dtype=bfloat16", "--max-total-tokens=8192", flag),
            decode=("--kvspec-draft-len=0",),
        )
        with running_pair(spec, tmp_path / form, announce) as pair:
            found[form] = {"two servers": ask(f"{form} over a link", pair.client)}
    check(found)
