"""Kinds of values that a flag takes: how each is parsed, checked and described."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from sglang_kvspec.core.registry import Registry

# Above any real size, rate or time. A machine's own memory is checked when a server starts.
MOST = 1e12


@dataclass(frozen=True, slots=True)
class Kind(ABC):
    """Kind of values that a flag takes. metavar: placeholder of the value in --help."""

    metavar: str

    def parse(self, value: Any) -> Any:
        """Convert a value as a command line, a YAML file or a caller gives it.

        Raises ValueError, TypeError or OverflowError if that is impossible. allows() may still
        refuse the result.
        """
        return value

    @abstractmethod
    def allows(self, value: object) -> bool: ...

    @abstractmethod
    def demand(self, value: object) -> str:
        """Return what `value`, which is not allowed, must be: "must be ..."."""

    @abstractmethod
    def allowed(self, default: object) -> str:
        """Describe the allowed values in Markdown, with the default first if all are listed."""


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    """True or false; a command line may leave the value out."""

    metavar: str = "true|false"

    def parse(self, value: Any) -> Any:
        # A quoted word in a YAML file is a string.
        words = {"true": True, "false": False}
        return words.get(value.lower(), value) if isinstance(value, str) else value

    def allows(self, value: object) -> bool:
        return isinstance(value, bool)

    def demand(self, value: object) -> str:
        return "must be true or false, or have no value"

    def allowed(self, default: object) -> str:
        return "`false`, `true`"


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of several words."""

    choices: tuple[str, ...]

    def allows(self, value: object) -> bool:
        return value in self.choices

    def demand(self, value: object) -> str:
        return f"must be one of {', '.join(self.choices)}"

    def allowed(self, default: object) -> str:
        return _listed(self.choices, default)


@dataclass(frozen=True, slots=True)
class ChoiceOrFolder(Kind):
    """One of several words, or a folder. A folder has a slash, so that no misspelt word is one."""

    choices: tuple[str, ...]

    def allows(self, value: object) -> bool:
        return isinstance(value, str) and (value in self.choices or "/" in value)

    def demand(self, value: object) -> str:
        return f"must be one of {', '.join(self.choices)}, or a folder with a slash in its path"

    def allowed(self, default: object) -> str:
        return f"{_listed(self.choices, default)}, a folder"


def choice_of(literal: Any) -> Choice:
    """Return the choice between the words of a Literal."""
    choices = get_args(literal)
    return Choice(f"{{{','.join(choices)}}}", choices)


@dataclass(frozen=True, slots=True)
class Name(Kind):
    """Name of an implementation of a seam, built in or registered by another package. word: also
    allowed, unless it is None; it leaves the choice to the server."""

    registry: Registry
    word: str | None = None

    def allows(self, value: object) -> bool:
        # Built-in names first: a search for entry points reads every installed package.
        ours = self._with_word(self.registry.built_in)
        return isinstance(value, str) and (value in ours or value in self.registry.names())

    def demand(self, value: object) -> str:
        return f"must be one of {', '.join(self._with_word(self.registry.names()))}"

    def allowed(self, default: object) -> str:
        ours = _listed(self._with_word(self.registry.built_in), default)
        return f"{ours}; more by entry points of `{self.registry.group}`"

    def _with_word(self, names: Iterable[str]) -> tuple[str, ...]:
        return (*names,) if self.word is None else (self.word, *names)


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    """Whole number from `least` to `most`, or `word` unless it is None."""

    least: int
    most: int
    word: str | None = None

    def parse(self, value: Any) -> Any:
        if value == self.word or isinstance(value, bool):
            return value
        number = int(value)
        if not isinstance(value, str) and number != value:
            raise ValueError(f"{value!r} is not a whole number")
        return number

    def allows(self, value: object) -> bool:
        if self.word is not None and value == self.word:
            return True
        return type(value) is int and self.least <= value <= self.most

    def demand(self, value: object) -> str:
        word = "" if self.word is None else f"{self.word!r} or "
        return f"must be {word}an integer from {self.least} to {self.most}"

    def allowed(self, default: object) -> str:
        word = "" if self.word is None else f"`{self.word}`, "
        return f"{word}{self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """Finite number from `least` to `most`, in `unit`, or `word` unless it is None. is_above:
    `least` itself is refused."""

    least: float = 0
    most: float = MOST
    unit: str = ""
    is_above: bool = False
    word: str | None = None

    def parse(self, value: Any) -> Any:
        return value if value == self.word or isinstance(value, bool) else float(value)

    def allows(self, value: object) -> bool:
        if self.word is not None and value == self.word:
            return True
        if not _is_number(value) or not self.least <= value <= self.most:  # type: ignore[operator]
            return False
        return not self.is_above or value != self.least

    def demand(self, value: object) -> str:
        number = "" if _is_number(value) else "a number "
        unit = f" ({self.unit})" if self.unit else ""
        if self.most != MOST:
            word = "" if self.word is None else f"{self.word!r} or "
            return f"must be {word}{number}between {self.least:g} and {self.most:g}{unit}"
        sign = ">" if self.is_above else ">="
        return f"must be {number}{sign} {self.least:g} and finite{unit}"

    def allowed(self, default: object) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if self.most != MOST:
            word = "" if self.word is None else f"`{self.word}`, "
            return f"{word}{self.least:g} to {self.most:g}{unit}"
        return f"above {self.least:g}{unit}" if self.is_above else f"{self.least:g}{unit} or more"


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Text that is not empty. what: thing that the text must name, such as "a folder"."""

    what: str

    def allows(self, value: object) -> bool:
        return isinstance(value, str) and value != ""

    def demand(self, value: object) -> str:
        return f"must be {self.what}"

    def allowed(self, default: object) -> str:
        return self.what


def _listed(words: Iterable[str], default: object) -> str:
    """Return the words in Markdown, the default first."""
    return ", ".join(f"`{word}`" for word in sorted(words, key=lambda word: word != default))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
