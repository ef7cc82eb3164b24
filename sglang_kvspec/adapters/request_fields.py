"""Checks of one field of a request. Each raises ValueError, which names the field and its value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any

# SGLang sends integers between processes as signed 64-bit numbers.
INT64 = range(-(2**63), 2**63)
# Callers of sglang.Engine may use any of these for a list.
LISTS = (list, tuple, set, frozenset)
# Logits are float32: a bias beyond this would be infinite.
MAX_BIAS = 3.4e38


def check_keys(what: str, value: Any, known: Iterable[str]) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object, got {shown(value)}")
    for name in value:
        if name not in known:
            allowed = ", ".join(sorted(known))
            raise ValueError(f"{what} has no field {shown(name)} (allowed: {allowed})")


def check_integer(least: int | None = None) -> Callable[[str, Any], None]:
    allowed = "an integer" if least is None else f"an integer of at least {least}"

    def check(name: str, value: Any) -> None:
        if not is_int64(value) or (least is not None and value < least):
            raise ValueError(f"{name} must be {allowed}, got {shown(value)}")

    return check


def check_number(name: str, value: Any) -> None:
    if not is_finite(value):
        raise ValueError(f"{name} must be a finite number, got {shown(value)}")


def check_switch(name: str, value: Any) -> None:
    if value not in (True, False):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")


def check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {shown(value)}")


def check_texts(name: str, value: Any) -> None:
    if not all(isinstance(text, str) for text in each(value)):
        raise ValueError(f"{name} must be a string or a list of strings, got {shown(value)}")


def check_patterns(name: str, value: Any) -> None:
    check_texts(name, value)
    for pattern in each(value):
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"{name} {shown(pattern)} is not a regular expression: {error}"
            ) from error


def check_token_list(name: str, value: Any) -> None:
    # SGLang drops None from the list.
    is_list = isinstance(value, LISTS)
    if not is_list or not all(token is None or is_int64(token) for token in value):
        raise ValueError(f"{name} must be a list of token ids, got {shown(value)}")


def check_bias(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object of token ids and numbers, got {shown(value)}")
    for token, bias in value.items():
        try:
            int(token)
        except (TypeError, ValueError):
            raise ValueError(f"{name} has the key {shown(token)}: expected a token id") from None
        if not is_finite(bias) or abs(bias) > MAX_BIAS:
            raise ValueError(
                f"{name} of token {token} must be from -{MAX_BIAS:g} to {MAX_BIAS:g}, got "
                f"{shown(bias)}"
            )


def check_object(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {shown(value)}")


def check_embeds(embeds: Any) -> None:
    """Raise ValueError for empty lists, of which SGLang would read the first number. Does not check
    the numbers."""
    first = embeds
    for _ in range(2):
        if not isinstance(first, list) or not first:
            raise ValueError(
                "input_embeds must be a list of vectors, or a list of lists of vectors"
            )
        first = first[0]


def each(value: Any) -> Iterable[Any]:
    """Return the entries of a list, or a single value as the only entry."""
    return value if isinstance(value, LISTS) else [value]


def is_int64(value: Any) -> bool:
    """Return True for integers of Python or numpy; False for booleans."""
    # int() first: a range would compare an integer of another type with each of its numbers.
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return is_integer and int(value) in INT64


def is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, bool | str) and math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def shown(value: Any) -> str:
    """Return the value as an error shows it, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
