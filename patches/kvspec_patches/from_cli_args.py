"""ServerArgs.from_cli_args: carries the --kvspec flags to ServerArgs, which drops flags that it
does not declare, and switches KVSpec on or off for the child processes of this process. A bad flag
gives one line instead of a traceback.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from sglang_kvspec.adapters.early_refusal import exit_with
from sglang_kvspec.adapters.server_args import build_server_args
from sglang_kvspec.core.errors import KVSpecError


def hook(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    def make(**fields: Any) -> Any:
        return original(cls, argparse.Namespace(**fields))

    try:
        return build_server_args(make, vars(args))
    except KVSpecError as error:
        exit_with(error)
