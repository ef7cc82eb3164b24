"""Command-line flags of KVSpecConfig. Each flag is declared in core/flags.py."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flag_needs import flag_name
from sglang_kvspec.core.flags import FLAG_OF, FLAGS, SWITCH

PREFIX = "kvspec_"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the kvspec group. Values are checked by KVSpecConfig, whose messages name the flag, so
    choices are shown here but not enforced."""
    group = parser.add_argument_group(
        "kvspec", "serve on a 4-bit KV cache and return the output of full precision"
    )
    group.add_argument(
        SWITCH.name, nargs="?", const=True, metavar=SWITCH.kind.metavar, help=SWITCH.help_line()
    )
    for flag in FLAGS:
        group.add_argument(flag.name, metavar=flag.kind.metavar, help=flag.help_line())


def is_ours(name: str) -> bool:
    return name == "kvspec" or name.startswith(PREFIX)


def flag_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kvspec flags among parsed or keyword arguments, unset ones left out."""
    return {name: value for name, value in arguments.items() if is_ours(name) and value is not None}


def parse_config(values: dict[str, Any]) -> KVSpecConfig | None:
    """Build the configuration from `kvspec` and `kvspec_*` values; None when kvspec is off.

    Strings are converted, as flags and YAML files give them. Raises ConfigError.
    """
    values = dict(values)
    is_on = SWITCH.parse(values.pop("kvspec", SWITCH.default))
    SWITCH.check_value(is_on)
    options = {name.removeprefix(PREFIX): value for name, value in values.items()}
    options = {name: value for name, value in options.items() if value is not None}
    if not is_on:
        if options:
            raise ConfigError(f"{flag_name(next(iter(options)))} has no effect without --kvspec")
        return None
    return KVSpecConfig.from_dict({name: _parsed(name, v) for name, v in options.items()})


def _parsed(option: str, value: Any) -> Any:
    # An unknown option is refused by KVSpecConfig.
    flag = FLAG_OF.get(option)
    return value if flag is None else flag.parse(value)
