"""Scorers by the names and options that --kvspec-compressor takes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from sglang_kvspec.core.compressor import Allocation, Compressor
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import SCORERS
from sglang_kvspec.scorers.base import Scorer

# Types of a scorer's options.
_KINDS = {int: "a whole number", float: "a number", str: "text"}


def make_scorer(compressor: Compressor) -> Scorer:
    """Make the scorer of a parsed --kvspec-compressor. Raises ConfigError for an option that it
    does not have, for a value of another type, and where the scorer refuses its options."""
    made = find_scorer(compressor.name)
    known = options_of(made)
    given: dict[str, Any] = {}
    for key, text in compressor.options.items():
        where = f"--kvspec-compressor {compressor.name}: the option {key}"
        if key not in known:
            allowed = ", ".join(sorted([*known, "by", "heads", "keep_anchors"]))
            raise ConfigError(f"{where} does not exist (allowed: {allowed})")
        try:
            given[key] = known[key](text)
        except ValueError:
            raise ConfigError(f"{where} must be {_KINDS[known[key]]}, got {text!r}") from None
    scorer: Scorer = made(**given)
    return scorer


def find_scorer(name: str) -> Any:
    """Return the class of the scorer `name`. Raises ConfigError where there is none, or where the
    entry point leads to something else."""
    found = SCORERS.load(name)
    members = ("score", "about", "needs", "allocation")
    is_scorer = isinstance(found, type) and is_dataclass(found)
    if not (is_scorer and all(hasattr(found, member) for member in members)):
        raise ConfigError(
            f"--kvspec-compressor {name}: the entry point must lead to a frozen dataclass with a "
            f"method score(), as sglang_kvspec.scorers.base.Scorer, got {found!r}"
        )
    if found.allocation not in get_args(Allocation):
        raise ConfigError(
            f"--kvspec-compressor {name}: its allocation must be one of "
            f"{', '.join(get_args(Allocation))}, got {found.allocation!r}"
        )
    return found


def allocation_of(compressor: Compressor) -> Allocation:
    """Return which heads share a budget: what was asked, or the scorer's own choice."""
    allocation: Allocation = compressor.heads or find_scorer(compressor.name).allocation
    return allocation


def options_of(scorer: Any) -> dict[str, type]:
    """Return the type of each option of a scorer's class. Raises ConfigError for a type that text
    cannot be converted to."""
    hints = get_type_hints(scorer)
    kinds = {field.name: hints[field.name] for field in fields(scorer) if field.init}
    for name, kind in kinds.items():
        if kind not in _KINDS:
            raise ConfigError(
                f"the option {name} of the scorer {scorer.__name__} must be an int, a float or a "
                f"str, got {kind!r}"
            )
    return kinds
