"""Real servers on a GPU, or on the CPU with --cpu. All compute deterministically, so any difference
between two answers is an error.

One session has one set of prompts. For each target one server without drafts answers them one at a
time. Every other server must give these answers, however it got there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

# These folders are no packages, and their modules import each other by these roots.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sglang"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fleet import ONLY_ON_GPU, Fleet, Platform, Room
from gpu_report import GpuReport
from live_server import Answers, LiveServer

from kvspec_testkit.servers.server_process import ServerStartError

ROOT = Path(__file__).resolve().parents[2]
SHORTEST = 100
# Files in the order of their tests: what tells most comes first.
ORDER = ("identity", "features", "prefix_tiers", "disaggregation", "ranks")
REPORT = "gpu-report"
START_AND_ANSWERS = pytest.mark.timeout(900, method="signal")


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.addoption
    add("--cpu", action="store_true", help="run the servers on this machine's CPU, in float32")
    add("--gpu-model", type=Path, default=ROOT / "models" / "demo-5m", help="folder of the model")
    add("--gpu-prompts", type=int, default=16, help="prompts that every server answers")
    add("--gpu-longest", type=int, default=3000, help="tokens of the longest prompt")
    add("--gpu-tokens", type=int, default=64, help="tokens of each answer")
    add("--gpu-logs", type=Path, default=ROOT / ".kvspec" / "gpu_server", help="folder for logs")
    add("--gpu-kernels", default="auto", help="--kvspec-kernels of every server")
    add("--gpu-report", type=Path, help="where to write the figures of these tests")
    add("--gpu-commit", help="commit to record (default: what git reports)")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GpuReport(config), REPORT)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(item.path).parent == Path(__file__).parent]
    can_run = config.getoption("--cpu") or torch.cuda.is_available()
    places = {f"test_{name}.py": place for place, name in enumerate(ORDER)}
    here.sort(key=lambda item: places[Path(item.path).name])
    items[:] = [item for item in items if item not in here] + here
    for item in here:
        item.add_marker(START_AND_ANSWERS)
        if not can_run:
            item.add_marker(pytest.mark.skip("needs a CUDA device, or --cpu"))
        elif config.getoption("--cpu") and _server_of(item) in ONLY_ON_GPU:
            item.add_marker(pytest.mark.skip("needs a CUDA device: servers on a CPU use float32"))
        elif item.get_closest_marker("two_ranks") and not _has_two(config):
            item.add_marker(pytest.mark.skip("needs two CUDA devices, or --cpu"))


def _server_of(item: pytest.Item) -> str | None:
    """Return the name of the server or pair that a test is parametrized with."""
    chosen = getattr(item, "callspec", None)
    names = {} if chosen is None else chosen.params
    return next((names[key] for key in ("server", "pair", "name") if key in names), None)


def _has_two(config: pytest.Config) -> bool:
    return bool(config.getoption("--cpu") or torch.cuda.device_count() > 1)


@pytest.fixture(scope="session")
def platform(request: pytest.FixtureRequest) -> Platform:
    option = request.config.getoption
    on_gpu = not option("--cpu")
    return Platform(option("--gpu-model"), on_gpu=on_gpu, kernels=option("--gpu-kernels"))


@pytest.fixture(scope="session")
def prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    """Prompts whose lengths are spread from SHORTEST to --gpu-longest, long and short ones
    mixed."""
    from acceptance.prompts import cut_prompts, even_lengths

    option = request.config.getoption
    count, longest = option("--gpu-prompts"), option("--gpu-longest")
    windows, _ = cut_prompts(option("--gpu-model"), count, longest)
    lengths = even_lengths(count, SHORTEST, longest)
    # 7 and a power of two have no common divisor, so every length comes once.
    mixed = [lengths[place * 7 % count] for place in range(count)] if count % 7 else lengths
    return [window[:n] for window, n in zip(windows.tolist(), mixed, strict=True)]


@pytest.fixture(scope="session")
def new_tokens(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--gpu-tokens"))


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest,
    platform: Platform,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """The servers of this session. On a GPU, those that the chosen tests name in `servers` marks
    start together, before the first test."""
    named: Sequence[str] = [
        name
        for item in request.session.items
        for mark in item.iter_markers("servers")
        for name in mark.args
        if not item.get_closest_marker("skip")
    ]
    option = request.config.getoption
    room = Room.of(option("--gpu-longest") + option("--gpu-tokens"))
    scratch = tmp_path_factory.mktemp("servers")
    with Fleet(platform, room, scratch, option("--gpu-logs")) as servers:
        if platform.on_gpu:
            # A server that does not start fails its own tests, which try again.
            with suppress(ServerStartError):
                servers.start("off", *named)
        yield servers


@pytest.fixture(scope="session")
def expected(fleet: Fleet, prompts: list[list[int]], new_tokens: int) -> Answers:
    """Answers of the server without drafts, one prompt at a time."""
    return fleet["off"].ask(prompts, new_tokens, at_once=False)


@pytest.fixture(scope="session")
def expected_int8(fleet: Fleet, prompts: list[list[int]], new_tokens: int) -> Answers:
    """Answers at the int8 target of the server without drafts, one prompt at a time."""
    return fleet["int8 off"].ask(prompts, new_tokens, at_once=False)


@pytest.fixture(scope="session")
def same(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that asserts that answers are those expected, and counts them for
    --gpu-report."""
    report = request.config.pluginmanager.get_plugin(REPORT)

    def check(found: Answers, wanted: Answers, target: str = "exact") -> None:
        differ = [n for n, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]
        report.count_answers(target, len(wanted), len(differ))
        assert not differ, f"{len(differ)} of {len(wanted)} answers differ: numbers {differ}"

    return check


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[LiveServer]:
    """The server that the test is parametrized with. pytest runs all tests of a server in a row. A
    CPU's memory has no room for many, so there the server stops behind them."""
    yield fleet[request.param]
    if not fleet.platform.on_gpu:
        fleet.stop(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `server` with the names in the test's mark `servers`."""
    mark: Any = metafunc.definition.get_closest_marker("servers")
    if "server" in metafunc.fixturenames and mark is not None:
        metafunc.parametrize("server", mark.args, indirect=True, scope="session")
