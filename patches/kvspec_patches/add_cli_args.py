"""ServerArgs.add_cli_args: adds the --kvspec flags as one group of --help."""

from __future__ import annotations

import argparse

from sglang_kvspec.adapters.flags import add_flags


def hook(result: object, parser: argparse.ArgumentParser, *args: object) -> None:
    add_flags(parser)
