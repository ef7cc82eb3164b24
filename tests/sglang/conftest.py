"""Fixtures around real servers. Files of this folder import the `harness` folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# This folder is no package: a root with tests/sglang/__init__.py would shadow SGLang itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))
# The fuzzer belongs to the benchmarks; these tests run a short part of it.
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness.faults import fault_file_in
from harness.feature_answers import KVSPEC, PLAIN, SEEDS, answer_to, sample
from harness.features import CASES
from harness.identity_report import IdentityReport
from harness.models import DEMO_MODEL
from harness.pair import Pair, running_pair
from harness.references import PlainReference, Workload
from harness.scenarios import PREFIX_HITS
from harness.servers import Announce, ServerSwitch
from harness.shard import WHOLE, Shard
from harness.soak import CROWD_LENGTHS
from harness.suite import Task, TokenIds

# SGLang compiles a penalty when it is first used, which takes longer than it saves in tests.
# Benchmarks keep the compilation: they measure servers as users start them.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# Limit for one test and its fixtures: servers that start one after the other, and the answers of
# plain SGLang to all cases. A signal, not a thread, ends the test, so that fixtures stop the
# servers.
SERVER_TEST = pytest.mark.timeout(1800, method="signal")
# The full matrix takes hours in one test. A soak test takes as long as its option says.
UNBOUNDED = pytest.mark.timeout(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--identity-report", type=Path, help="where to write the figures of the identity tests"
    )
    parser.addoption(
        "--packed-report",
        type=Path,
        help="where to write the figures of test_packed_residuals_in_full.py, which are of bf16",
    )
    parser.addoption(
        "--reference-cache",
        type=Path,
        help="folder that keeps reference answers for identity tests run side by side",
    )
    parser.addoption(
        "--identity-shard",
        type=Shard.parse,
        default=WHOLE,
        metavar="I/N",
        help="the full identity matrix on every N-th prompt only; benchmarks/merge_identity.py "
        "adds the reports of all N up",
    )
    parser.addoption(
        "--soak-seconds", type=float, default=1800.0, help="how long `-m soak` sends traffic"
    )
    parser.addoption("--soak-report", type=Path, help="where to write the figures of `-m soak`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the full matrix, which takes hours, without `-m identity`, and soak tests without
    `-m soak`."""
    unwanted = [name for name in ("identity", "soak") if name not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, unwanted))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        is_long = any(map(item.get_closest_marker, ("identity", "soak")))
        if item.get_closest_marker("server") and not item.get_closest_marker("timeout"):
            item.add_marker(UNBOUNDED if is_long else SERVER_TEST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of the server's log to the report of a test whose server has died."""
    report = yield
    servers = getattr(item, "funcargs", {}).get("servers")
    if report.failed and servers is not None and (words := servers.last_words()):
        report.sections.append(("The server has ended", words))
    return report


@pytest.fixture(scope="session")
def announce(request: pytest.FixtureRequest) -> Announce:
    """Return a function that writes a line to the terminal at once, past pytest's capture."""
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.ensure_newline()
            terminal.write_line(line)

    return write


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, announce: Announce) -> Iterator[ServerSwitch]:
    """Servers that are alive at a time. A test that starts its own servers must call release()
    first."""
    with ServerSwitch(tmp_path_factory.mktemp("servers"), announce) as switch:
        yield switch


@pytest.fixture(scope="session")
def plain_answers(servers: ServerSwitch) -> dict[str, Any]:
    """Answers of plain SGLang to every case, or the errors that it gives."""
    url = servers.use(PLAIN).base_url
    return {name: answer_to(name, url) for name in CASES}


@pytest.fixture(
    scope="module", params=["staggered", pytest.param("rounds", marks=pytest.mark.identity)]
)
def soak_schedule(request: pytest.FixtureRequest) -> str:
    """Schedule of a module's server, so that tests on one server follow each other."""
    return request.param


@pytest.fixture(scope="session")
def soak_fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KVSPEC_FAULT_FILE of the server that soak tests share."""
    return fault_file_in(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def prefix_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for prefixes on disk of the server that soak tests share."""
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(scope="session")
def crowd_answers(
    request: pytest.FixtureRequest, servers: ServerSwitch, announce: Announce
) -> list[tuple[Task, TokenIds]]:
    """Tasks of a crowd, each with the answer that plain SGLang gives to it alone."""
    workload = Workload(DEMO_MODEL, CROWD_LENGTHS, max_new_tokens=32)
    cache = request.config.getoption("--reference-cache")
    reference = PlainReference(servers, workload, (PREFIX_HITS,), announce, cache)
    followers = [family.follower for family in reference.suite.families]
    tasks = (*reference.suite.prompts, *followers)
    return [(task, reference.answer(task)) for task in tasks]


@pytest.fixture(scope="session")
def seeded_answers(servers: ServerSwitch, plain_answers: dict[str, Any]) -> dict[int, list[int]]:
    """Answers to each seed on one rank, one request at a time."""
    url = servers.use(KVSPEC).base_url
    return {seed: sample(url, seed) for seed in SEEDS}


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, servers: ServerSwitch, announce: Announce
) -> PlainReference:
    """Answers of plain SGLang to the module's WORKLOAD, with families where FAMILIES says so."""
    module, cache = request.module, request.config.getoption("--reference-cache")
    scenarios = (PREFIX_HITS,) if module.FAMILIES else ()
    return PlainReference(servers, module.WORKLOAD, scenarios, announce, cache)


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest,
    servers: ServerSwitch,
    tmp_path_factory: pytest.TempPathFactory,
    announce: Announce,
) -> Iterator[Pair]:
    """A prefill and a decode server as the module's PAIR specifies them."""
    servers.release()
    with running_pair(request.module.PAIR, tmp_path_factory.mktemp("pair"), announce) as running:
        yield running


@pytest.fixture(scope="session")
def identity_report(request: pytest.FixtureRequest) -> IdentityReport:
    return IdentityReport(
        request.config.getoption("--identity-report"),
        settings={"device": "cpu", "dtype": "float32", "temperature": 0},
        shard=request.config.getoption("--identity-shard"),
    )
