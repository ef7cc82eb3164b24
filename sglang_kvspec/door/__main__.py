"""`python -m sglang_kvspec.door --prefill URL --decode URL`."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Sequence

from aiohttp import web

from sglang_kvspec.door.app import make_app
from sglang_kvspec.door.exchange import Limits
from sglang_kvspec.door.servers import Servers, server_url


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; then finish what runs, for --drain-s at most."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    limits = Limits(
        request_bytes=int(args.max_request_mb * 2**20), request_s=args.request_timeout_s
    )
    web.run_app(
        make_app(Servers(args.prefill, args.decode), limits),
        host=args.host,
        port=args.port,
        shutdown_timeout=args.drain_s,
        handler_cancellation=True,
        access_log=None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_kvspec.door",
        description="One address for prefill and decode servers of SGLang that run apart.",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            metavar="URL",
            action="append",
            required=True,
            type=_url,
            help=f"a server with --disaggregation-mode {role}; several take turns",
        )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="where to listen (%(default)s)")
    parser.add_argument(
        "--max-request-mb",
        type=_positive,
        default=64.0,
        help="largest request accepted (%(default)s)",
    )
    parser.add_argument(
        "--request-timeout-s",
        type=_positive,
        default=3600.0,
        help="until a request must have been answered (%(default)s)",
    )
    parser.add_argument(
        "--drain-s",
        type=_positive,
        default=30.0,
        help="how long running requests may take after SIGTERM or Ctrl-C (%(default)s)",
    )
    return parser


def _url(text: str) -> str:
    try:
        return server_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> float:
    """aiohttp takes 0 for no limit at all."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


if __name__ == "__main__":
    main()
