"""Refusal of wrong --kvspec flags while SGLang is still being imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from sglang_kvspec.adapters.flags import add_flags, flag_values, parse_config
from sglang_kvspec.core.errors import ConfigError, KVSpecError

LAUNCHER = "sglang.launch_server"
_FLAG = "--kvspec"
_NOT_OURS = ("-h", "--help", "--model-type=diffusion")


def refuse_early() -> None:
    """Exit with code 2 if this process is a server's command line with wrong --kvspec flags.

    SGLang first calls plugins when it chooses a platform. It has imported torch, torchvision and
    triton by then, which takes 2.2 of the 8.6 CPU seconds until it parses flags, but not
    transformers.
    """
    arguments = server_arguments(sys.orig_argv, sys.argv)
    if arguments is None:
        return
    try:
        check_arguments(arguments)
    except ConfigError as error:
        exit_with(error)


def exit_with(error: KVSpecError) -> NoReturn:
    """Print one sentence and end the process as argparse does."""
    print(f"sglang-kvspec: error: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def server_arguments(original: Sequence[str], current: Sequence[str]) -> list[str] | None:
    """Return the arguments of `python -m sglang.launch_server` or `sglang serve`, else None.

    original: sys.orig_argv; current: sys.argv while SGLang is being imported. A spawned process
    takes over its parent's sys.argv, but its original command line is multiprocessing's.
    """
    if not current or len(original) <= len(current):
        return None
    arguments = list(current[1:])
    if current[0] == "-m":
        # Python writes the module's path here once the module is found.
        is_server = original[-len(current)] == LAUNCHER
    else:
        is_script = list(original[-len(current) :]) == list(current)
        is_server = is_script and Path(current[0]).name == "sglang" and arguments[:1] == ["serve"]
        arguments = arguments[1:]
    is_diffusion = "--model-type diffusion" in " ".join(arguments)
    if not is_server or is_diffusion or not set(arguments).isdisjoint(_NOT_OURS):
        return None
    return arguments


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError for --kvspec flags that SGLang's own parser or ServerArgs would refuse.

    Every other argument is left to SGLang, and so is a --config file that cannot be read.
    """
    parser = _FlagParser(add_help=False)
    add_flags(parser)
    if "--config" in arguments:
        # Imported late: needs yaml, which most command lines do not.
        from sglang_kvspec.adapters.compat.config_file import ConfigArgumentMerger

        try:
            arguments = ConfigArgumentMerger(parser).merge_config_with_args(list(arguments))
        except Exception:
            return
    if not any(argument.startswith(_FLAG) for argument in arguments):
        return
    _check_names(parser, arguments)
    known, _ = parser.parse_known_args(arguments)
    parse_config(flag_values(vars(known)))


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _check_names(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for argument in arguments:
        name = argument.partition("=")[0]
        # argparse treats text with a space as a value, and accepts a flag's beginning as the flag.
        if not name.startswith(_FLAG) or " " in argument:
            continue
        if not any(flag.startswith(name) for flag in flags):
            close = get_close_matches(name, flags, n=1)
            raise ConfigError(
                f"{name} is not a flag of KVSpec (allowed: {', '.join(close or flags)}): see --help"
            )
