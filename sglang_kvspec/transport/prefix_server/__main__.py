"""`python -m sglang_kvspec.transport.prefix_server --dir D`: prefixes for several servers."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from sglang_kvspec.core.config import DEFAULT_PREFIX_GB, LOOPBACK, MAX_HOST_GB
from sglang_kvspec.core.errors import (
    ConfigError,
    KVSpecError,
    PrefixStoreError,
    TransportError,
)
from sglang_kvspec.transport.keys import CurveKeys, load_keys
from sglang_kvspec.transport.port import ZmqPort
from sglang_kvspec.transport.prefix_server.server import PrefixServer
from sglang_kvspec.transport.prefix_server.shelves import Shelves

GIB = 2**30
DEFAULT_PORT = 30500
MAX_PORT = 65535
# Seconds that a closing prefix server waits for pages on their way to disk.
CLOSE_TIMEOUT_S = 10.0


def main(arguments: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Exits with code 2 after one sentence about wrong input."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        keys = None if args.keys is None else load_keys("--keys", args.keys)
        shelves = _open_shelves(args)
        port = _listen(args.host, args.port, keys)
    except KVSpecError as error:
        print(f"sglang-kvspec: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"serving the prefixes in {args.dir} on {port.address}", flush=True)
    _serve(PrefixServer(port, shelves), shelves)


def _open_shelves(args: argparse.Namespace) -> Shelves:
    try:
        return Shelves(args.dir, int(args.gb * GIB), args.models)
    except PrefixStoreError as error:
        raise ConfigError(
            f"--dir {args.dir}: {error} (allowed: a writable folder of no other prefix server)"
        ) from None


def _listen(host: str, port: int, keys: CurveKeys | None) -> ZmqPort:
    try:
        return ZmqPort(f"tcp://{host}:{port}", bind=True, keys=keys)
    except TransportError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error} (allowed: an address of this machine and a "
            "free port; an address off loopback requires --keys)"
        ) from None


def _serve(server: PrefixServer, shelves: Shelves) -> None:
    """Serve until SIGTERM or Ctrl-C, then print totals and close."""
    is_over = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal is_over
        is_over = True
        server.wake()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    while not is_over:
        server.step(timeout_s=1.0)
    for line in shelves.report():
        print(line)
    print(server.counters, flush=True)
    server.close()
    shelves.close(CLOSE_TIMEOUT_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_kvspec.transport.prefix_server",
        description="Store encoded prefixes on disk for servers with --kvspec-prefix-server.",
    )
    parser.add_argument("--dir", type=Path, required=True, help="folder of the stored prefixes")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port",
        type=_port,
        default=DEFAULT_PORT,
        help="port to listen on; 0 chooses a free port (%(default)s)",
    )
    parser.add_argument(
        "--gb",
        type=_positive,
        default=DEFAULT_PREFIX_GB,
        help="GiB of disk for each model and setting; with several ranks, for each (%(default)g)",
    )
    parser.add_argument(
        "--models",
        type=_count,
        default=8,
        help="maximum number of stored models and settings; each rank counts (%(default)s)",
    )
    parser.add_argument(
        "--keys",
        metavar="DIR",
        help="folder with this end's CURVE certificate (own.key_secret) and the certificates of "
        "the servers that may connect (peers/*.key); required for an address off loopback",
    )
    return parser


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number <= MAX_HOST_GB:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most {MAX_HOST_GB:g}")
    return number


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= MAX_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (allowed: 0 to {MAX_PORT})")
    return int(text)


if __name__ == "__main__":
    main()
