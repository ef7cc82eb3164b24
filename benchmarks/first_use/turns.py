"""Runs on several servers of one model in turn, so that each pair of runs follow each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess

T = TypeVar("T")


def run_in_turn(
    servers: Mapping[str, Sequence[str]],
    arguments: Sequence[str],
    log_folder: Path,
    pairs: int,
    *,
    warm_up: Callable[[str], object],
    run: Callable[[str], T],
    check: Callable[[str, int, T, T], None],
    start_timeout_s: float,
) -> dict[str, list[T]]:
    """Return `pairs` runs of each server, after a warm-up on each as soon as it is healthy.

    servers: flags of each server by name, beside `arguments`, which all share. warm_up, run: take
    a server's URL. check: called after each run with the server's name, the number of the pair, the
    run, and the first run of the first server.
    """
    runs: dict[str, list[T]] = {name: [] for name in servers}
    (first, *_) = servers
    with ExitStack() as stack:
        urls = {}
        for name, flags in servers.items():
            server = ServerProcess(
                (*CPU_ARGUMENTS, *arguments, *flags), log_path=log_folder / f"{name}.log"
            )
            stack.enter_context(server)
            server.wait_healthy(start_timeout_s)
            warm_up(server.base_url)
            urls[name] = server.base_url
        for number in range(pairs):
            for name, url in urls.items():
                found = run(url)
                runs[name].append(found)
                check(name, number, found, runs[first][0])
    return runs
