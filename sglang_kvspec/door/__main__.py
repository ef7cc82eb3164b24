"""`python -m sglang_kvspec.door --prefill URL --decode URL`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from aiohttp import web

from sglang_kvspec.door.app import make_app
from sglang_kvspec.door.exchange import Limits
from sglang_kvspec.door.malformed import log_in_one_line
from sglang_kvspec.door.servers import Servers, server_url

MAX_PORT = 65535
# Above any real size or time; as MB, it still fits 64 bits in bytes.
MAX_LIMIT = 1e12


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests finish for --drain-s at most.

    Exits with code 2 and one sentence if the door cannot listen at --host and --port.
    """
    args = _parser().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    log_in_one_line()
    limits = Limits(
        request_bytes=int(args.max_request_mb * 2**20), request_s=args.request_timeout_s
    )
    app = make_app(Servers(args.prefill, args.decode), limits)
    try:
        web.run_app(
            app,
            host=args.host,
            port=args.port,
            shutdown_timeout=args.drain_s,
            handler_cancellation=True,
            access_log=None,
        )
    except (OSError, UnicodeError) as error:
        # Only listening raises these errors here: the handlers answer errors of requests.
        reason = getattr(error, "strerror", None) or error
        print(
            f"sglang-kvspec: error: --host {args.host} --port {args.port}: {reason} "
            "(allowed: an address of this machine and a free port)",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_kvspec.door",
        description="One HTTP address in front of the prefill and decode servers of SGLang.",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            metavar="URL",
            action="append",
            required=True,
            type=_url,
            help=f"URL of a server with --disaggregation-mode {role}; repeat the flag for several "
            "servers, which take turns",
        )
    parser.add_argument(
        "--host", type=_host, default="127.0.0.1", help="address to listen on (%(default)s)"
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        help="port to listen on; 0 chooses a free port (%(default)s)",
    )
    parser.add_argument(
        "--max-request-mb",
        type=_positive,
        default=64.0,
        help="largest accepted request, in MiB (%(default)s)",
    )
    parser.add_argument(
        "--request-timeout-s",
        type=_positive,
        default=3600.0,
        help="maximum seconds until a request is answered (%(default)s)",
    )
    parser.add_argument(
        "--drain-s",
        type=_positive,
        default=30.0,
        help="maximum seconds for running requests after SIGTERM or Ctrl-C (%(default)s)",
    )
    return parser


def _url(text: str) -> str:
    try:
        return server_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _host(text: str) -> str:
    """Refuse an empty host, which aiohttp takes for all addresses of the machine."""
    if not text:
        raise argparse.ArgumentTypeError(
            "the address must not be empty (0.0.0.0 for all addresses)"
        )
    return text


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= MAX_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (allowed: 0 to {MAX_PORT})")
    return int(text)


def _positive(text: str) -> float:
    """Refuse 0, which aiohttp takes for no limit at all."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number <= MAX_LIMIT:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most {MAX_LIMIT:g}")
    return number


if __name__ == "__main__":
    main()
