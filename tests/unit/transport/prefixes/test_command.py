"""The prefix server as a process, on real sockets."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from time import monotonic

import pytest
import zmq
from zmq.auth import create_certificates

from kvspec_testkit.transport.prefix_rig import (
    LAYOUT,
    anchor_of,
    chain_of,
    links_of,
    residual_of,
)
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.transport.keys import CurveKeys, load_keys
from sglang_kvspec.transport.port import ZmqPort
from sglang_kvspec.transport.prefix_server import __main__ as command
from sglang_kvspec.transport.prefixes import (
    LookupEnded,
    PageFetched,
    PublishEnded,
    StoreClient,
    StoreEvent,
    StoreLoop,
    StoreTiming,
)

DEADLINE_S = 30.0
FAST = StoreTiming(probe_s=0.1, silence_s=0.6, retry_s=0.05)
LINKS = links_of(1, 2, 3)
NUMBERS = count(1)


class Process:
    """A prefix server that listens on a free port, or on the port of an earlier one."""

    def __init__(self, folder: Path, *arguments: str, port: str = "0") -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sglang_kvspec.transport.prefix_server"),
                *("--dir", str(folder), "--gb", "0.1", "--port", port, *arguments),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        first = self._process.stdout.readline()
        self.address = first.strip().rpartition(" ")[2]
        assert self.address.startswith("tcp://127.0.0.1:"), first
        self.port = self.address.rpartition(":")[2]

    def end(self, number: signal.Signals) -> str:
        """Return the output before the process ended, or "" if it had ended before."""
        if self._process.returncode is not None:
            return ""
        self._process.send_signal(number)
        said, _ = self._process.communicate(timeout=DEADLINE_S)
        return said


StartProcess = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[StartProcess]:
    """Function that starts prefix servers. They end with the test."""
    started: list[Process] = []

    def make(*arguments: object, **options: str) -> Process:
        started.append(Process(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for process in started:
        process.end(signal.SIGKILL)


def connected(loop: StoreLoop) -> StoreLoop:
    deadline_s = monotonic() + DEADLINE_S
    while not loop.is_live:
        assert monotonic() < deadline_s, loop.denial
        loop.take_events(0.01)
    return loop


def dial(address: str, keys: CurveKeys | None = None) -> StoreLoop:
    return StoreLoop(StoreClient(ZmqPort(address, bind=False, keys=keys), LAYOUT, timing=FAST))


def events_until(loop: StoreLoop, kind: type, number: int = 1) -> list[StoreEvent]:
    events: list[StoreEvent] = []
    deadline_s = monotonic() + DEADLINE_S
    while sum(isinstance(event, kind) for event in events) < number:
        assert monotonic() < deadline_s, events
        events += loop.take_events(0.1)
    return events


def publish(loop: StoreLoop) -> None:
    for number, link in enumerate(LINKS):
        loop.publish(number, chain_of([link]), memoryview(anchor_of(link) + residual_of(link)))
    assert all(e.is_kept for e in events_until(loop, PublishEnded, len(LINKS)))  # type: ignore[union-attr]


def fetch(loop: StoreLoop) -> None:
    """Fetch all published pages, once they are on disk."""
    deadline_s = monotonic() + DEADLINE_S
    while (num_pages := num_fetched(loop)) < len(LINKS):
        assert monotonic() < deadline_s, num_pages


def num_fetched(loop: StoreLoop) -> int:
    lookup = next(NUMBERS)
    loop.seek(lookup, chain_of(LINKS), [link.key for link in LINKS])
    *pages, _ = events_until(loop, LookupEnded)
    for page in pages:
        assert isinstance(page, PageFetched)
        assert page.lookup == lookup
        assert page.anchor == anchor_of(LINKS[page.page])
        assert page.residual == residual_of(LINKS[page.page])
    return len(pages)


def test_prefixes_outlive_the_process_that_kept_them(tmp_path: Path, start: StartProcess) -> None:
    server = start(tmp_path)
    with dial(server.address) as loop:
        publish(connected(loop))
        fetch(connected(loop))
        assert "pages_kept=3" in server.end(signal.SIGTERM)
        # Requests wait until the silence is noticed. After that nothing waits.
        assert num_fetched(loop) == 0
        deadline_s = monotonic() + DEADLINE_S
        while loop.is_live:
            assert monotonic() < deadline_s
            loop.take_events(0.01)
        server = start(tmp_path, port=server.port)
        fetch(connected(loop))
        server.end(signal.SIGKILL)
        server = start(tmp_path, port=server.port)
        assert num_fetched(loop) in (0, 3)
        fetch(connected(loop))


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Folders of a store, of a server that it knows, and of a stranger that knows the store."""
    folders = {name: tmp_path / name for name in ("store", "server", "stranger")}
    for folder in folders.values():
        (folder / "peers").mkdir(parents=True)
        create_certificates(folder, "own")
    for name, peer in (("store", "server"), ("server", "store"), ("stranger", "store")):
        public = (folders[peer] / "own.key").read_text()
        (folders[name] / "peers" / f"{peer}.key").write_text(public)
    return folders


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq without CURVE")
def test_only_servers_whose_keys_are_listed_get_in(
    tmp_path: Path, keys: dict[str, Path], start: StartProcess
) -> None:
    server = start(tmp_path / "prefixes", "--keys", str(keys["store"]))
    known, stranger = (load_keys("--x", str(keys[name])) for name in ("server", "stranger"))
    with dial(server.address, stranger) as outside, dial(server.address, known) as inside:
        publish(connected(inside))
        fetch(inside)
        assert not outside.is_live


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 --port 0: cannot listen"),
        (["--keys", "/nowhere"], "--keys /nowhere"),
        (["--gb", "0"], "must be above 0"),
        (["--gb", "1e300"], "1e300 must be above 0 and at most"),
        (["--gb", "many"], "'many' is not a number"),
        (["--port", "70000"], "'70000' is not a port (allowed: 0 to 65535)"),
        (["--port", "x"], "'x' is not a port (allowed: 0 to 65535)"),
        (["--models", "0"], "at least 1"),
        (["--models", "few"], "'few' is not an integer of at least 1"),
        (["--dir", "/dev/null/x"], "--dir /dev/null/x: cannot write to the folder"),
        (["--host", "::1"], "--host ::1 --port 0: expected tcp://host:port"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["--dir", str(tmp_path), "--port", "0", *arguments])
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_used_port_is_refused_by_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as stop:
            command.main(["--dir", str(tmp_path), "--port", port])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"--host 127.0.0.1 --port {port}: " in error
    assert "Address already in use" in error
    assert error.count("\n") == 1


def test_a_folder_has_one_prefix_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: StartProcess
) -> None:
    start(tmp_path)
    with pytest.raises(SystemExit):
        command.main(["--dir", str(tmp_path), "--port", "0"])
    assert "is being written by process" in capsys.readouterr().err


def test_keys_need_a_secret_and_a_peer(keys: dict[str, Path]) -> None:
    (keys["server"] / "peers" / "store.key").unlink()
    with pytest.raises(ConfigError, match=r"--flag .*no peers"):
        load_keys("--flag", str(keys["server"]))


@pytest.mark.parametrize(
    ("key", "reason"), [("short", "40 characters, got 5"), ("~" * 40, "other characters")]
)
def test_malformed_keys_are_refused_by_their_flag(
    keys: dict[str, Path], key: str, reason: str
) -> None:
    peer = keys["server"] / "peers" / "store.key"
    peer.write_text(f'curve\n    public-key = "{key}"\n')
    with pytest.raises(ConfigError, match=rf"--flag .*{reason}.*own.key_secret and peers"):
        load_keys("--flag", str(keys["server"]))
