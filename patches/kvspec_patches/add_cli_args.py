"""ServerArgs.add_cli_args: adds the --kvspec flags as one group of --help.

SGLang 0.5.17. Remove when SGLang lets plugins declare flags.
"""

from __future__ import annotations

import argparse

from sglang_kvspec.adapters.flags import add_flags

TARGET = "sglang.srt.server_args.ServerArgs.add_cli_args"
KIND = "after"
SCOPE = "flags"


def hook(result: object, parser: argparse.ArgumentParser, *args: object) -> None:
    add_flags(parser)
