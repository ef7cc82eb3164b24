"""Every declared flag: the configuration agrees with the flag, and refuses the same values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from sglang_kvspec.core.compressor import CompressorText
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flag import Flag
from sglang_kvspec.core.flag_kinds import (
    Choice,
    ChoiceOrFolder,
    Integer,
    Name,
    Number,
    Switch,
    Text,
)
from sglang_kvspec.core.flags import FLAGS, SWITCH

ALL_FLAGS = (SWITCH, *FLAGS)


def wrong_values(flag: Flag) -> list[Any]:
    """Return values outside the declared range, or of another type."""
    match flag.kind:
        case Choice(choices=choices):
            return ["zip", "", 4, choices[0].upper(), list(choices), True]
        case ChoiceOrFolder(choices=choices):
            return ["zip", "", 4, choices[0].upper(), list(choices), True]
        case Name(registry=registry) | CompressorText(registry=registry):
            first = next(iter(registry.built_in))
            return ["zip", "", 4, first.upper(), [first], True]
        case Integer(least=least, most=most):
            return [least - 1, most + 1, least + 0.5, float(least), str(least), "many", True]
        case Number(least=least, most=most, is_above=is_above):
            beyond = [least - 0.01, math.nextafter(most, math.inf), math.nan, math.inf, -math.inf]
            return [*beyond, *([least] if is_above else []), "1", "many", True]
        case Text():
            return ["", 3, True]
        case Switch():
            return ["yes", 1, None, {"a": 1}]
    raise AssertionError(f"{flag.name}: no wrong values of {type(flag.kind).__name__}")


def edge_values(flag: Flag) -> list[Any]:
    match flag.kind:
        case Choice(choices=choices):
            return list(choices)
        case ChoiceOrFolder(choices=choices):
            return [*choices, "./folder"]
        case Name(registry=registry, word=word):
            return [*registry.names(), *([] if word is None else [word])]
        case CompressorText(registry=registry):
            return [*registry.names(), "random:seed=3", "random:by=tokens,heads=model"]
        case Integer(least=least, most=most, word=word):
            return [least, most, *([] if word is None else [word])]
        case Number(least=least, most=most, is_above=is_above):
            return [math.nextafter(least, math.inf) if is_above else least, most]
        case Text():
            return ["x"]
    return [True, False]


def words_of_the_range(flag: Flag) -> list[str]:
    """Return words that a refusal must contain, so that it names the allowed values."""
    match flag.kind:
        case Choice(choices=choices):
            return list(choices)
        case ChoiceOrFolder(choices=choices):
            return [*choices, "folder"]
        case Name(registry=registry, word=word):
            return [*registry.names(), *([] if word is None else [word])]
        case CompressorText(registry=registry):
            return list(registry.names())
        case Integer(least=least, most=most, word=word):
            return ["integer", str(least), str(most), *([] if word is None else [word])]
        case Number(least=least, most=most, unit=unit):
            return [f"{least:g}", unit, f"{most:g}" if most < 1e12 else "finite"]
        case Text(what=what):
            return [what]
    return ["true", "false"]


def cases(values_of: Callable[[Flag], list[Any]], flags: Sequence[Flag] = ALL_FLAGS) -> list[Any]:
    return [
        pytest.param(flag, value, id=f"{flag.name}={value!r}")
        for flag in flags
        for value in values_of(flag)
    ]


@pytest.mark.parametrize(("flag", "value"), cases(wrong_values))
def test_a_wrong_value_is_refused_in_one_sentence(flag: Flag, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        flag.check_value(value)
    message = str(caught.value)
    assert message.startswith(f"{flag.name} must ")
    assert f"got {value!r}" in message
    assert "\n" not in message
    for word in words_of_the_range(flag):
        assert word in message


@pytest.mark.parametrize(("flag", "value"), cases(edge_values))
def test_the_ends_of_a_range_are_allowed(flag: Flag, value: Any) -> None:
    flag.check_value(value)


@pytest.mark.parametrize(("flag", "value"), cases(wrong_values, FLAGS))
def test_the_configuration_refuses_what_the_flag_refuses(flag: Flag, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        KVSpecConfig(**{flag.option: value})
    assert str(caught.value).startswith(f"{flag.name} must ")


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_none_is_the_value_of_flags_without_a_default_only(flag: Flag) -> None:
    if flag.default is None:
        flag.check_value(None)
    else:
        with pytest.raises(ConfigError, match=f"^{flag.name} must "):
            flag.check_value(None)


@pytest.mark.parametrize(("flag", "value"), cases(edge_values))
def test_text_of_a_command_line_is_converted(flag: Flag, value: Any) -> None:
    parsed = flag.parse(str(value))
    assert parsed == value
    assert type(parsed) is (float if isinstance(flag.kind, Number) else type(value))


@pytest.mark.parametrize(
    "flag",
    [flag for flag in FLAGS if isinstance(flag.kind, (Integer, Number))],
    ids=lambda flag: flag.name,
)
@pytest.mark.parametrize("value", ["many", "", "1,5", [1], {}])
def test_a_word_where_a_number_belongs_is_refused(flag: Flag, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"an integer|a number") as caught:
        flag.parse(value)
    assert str(caught.value).startswith(f"{flag.name} must ")
    assert f"got {value!r}" in str(caught.value)


@pytest.mark.parametrize("value", [7.5, math.inf, math.nan])
def test_an_integer_is_not_cut_off(value: float) -> None:
    (flag,) = (flag for flag in FLAGS if flag.option == "draft_len")
    with pytest.raises(ConfigError, match="'auto' or an integer from 0 to 64"):
        flag.parse(value)
    assert flag.parse(7.0) == 7


def test_each_field_of_the_configuration_is_a_flag() -> None:
    fields = dataclasses.fields(KVSpecConfig)
    assert [field.name for field in fields] == [flag.option for flag in FLAGS]
    assert {field.name: field.default for field in fields} == {
        flag.option: flag.default for flag in FLAGS
    }


VALUE_TYPES = {
    Integer: int,
    Number: float,
    Text: str,
    Name: str,
    ChoiceOrFolder: str,
    CompressorText: str,
    Switch: bool,
}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_field_has_the_type_of_its_flag(flag: Flag) -> None:
    hint = get_type_hints(KVSpecConfig)[flag.option]
    if isinstance(flag.kind, Choice):
        if flag.default is None:
            hint, none = get_args(hint)
            assert none is type(None)
        assert get_origin(hint) is Literal
        assert get_args(hint) == flag.kind.choices
        return
    types = set(get_args(hint) or (hint,))
    expected: set[Any] = {VALUE_TYPES[type(flag.kind)]}
    if flag.default is None:
        expected.add(type(None))
    if isinstance(flag.kind, Integer) and flag.kind.word is not None:
        expected.add(Literal["auto"])
    if isinstance(flag.kind, Number) and flag.kind.word is not None:
        expected.add(Literal["auto"])
    assert types == expected


@pytest.mark.parametrize("flag", ALL_FLAGS, ids=lambda flag: flag.name)
def test_a_declaration_is_complete(flag: Flag) -> None:
    assert flag.help
    assert flag.kind.metavar
    if flag.default is None:
        assert flag.unset is not None, "neither --help nor the README could name the default"
    else:
        assert flag.kind.allows(flag.default)
    if isinstance(flag.unset, float):
        assert flag.kind.allows(flag.unset)
