"""ServerArgs.from_cli_args: carries the --kvspec flags to ServerArgs, which drops flags that it
does not declare. A bad flag gives one line instead of a traceback.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from sglang_kvspec.adapters.early_refusal import exit_with
from sglang_kvspec.adapters.flags import flag_values, pending_flags
from sglang_kvspec.core.errors import KVSpecError


def hook(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    token = pending_flags.set(flag_values(args))
    try:
        return original(cls, args)
    except KVSpecError as error:
        exit_with(error)
    finally:
        pending_flags.reset(token)
