"""Checks of the options that scorers are given."""

from __future__ import annotations

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import SCORERS


def require(holds: bool, scorer: str, option: str, value: float | str, allowed: str) -> None:
    """Raise ConfigError for a value of an option that is not allowed."""
    if not holds:
        raise ConfigError(f"{SCORERS.flag} {scorer}: {option} must be {allowed}, got {value!r}")


def require_file(scorer: str, file: str, script: str) -> None:
    """Raise ConfigError if a scorer that reads a file is given none. script: what writes it."""
    if not file:
        raise ConfigError(
            f"{SCORERS.flag} {scorer} needs a file: write one with {script} and name it in "
            f"{SCORERS.flag} {scorer}:file=PATH"
        )
