"""Arguments of a function, read from its syntax tree."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a function. defaults: source text of each argument's default, if it has one."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    variadic: tuple[str, ...]
    defaults: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, args: ast.arguments) -> Arguments:
        positional = [each.arg for each in (*args.posonlyargs, *args.args)]
        keyword_only = [each.arg for each in args.kwonlyargs]
        defaults = list(
            zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True)
        )
        defaults += [
            (name, default)
            for name, default in zip(keyword_only, args.kw_defaults, strict=True)
            if default is not None
        ]
        variadic = [
            f"{stars}{each.arg}" for stars, each in (("*", args.vararg), ("**", args.kwarg)) if each
        ]
        return cls(
            tuple(positional),
            tuple(keyword_only),
            tuple(variadic),
            tuple((name, ast.unparse(default)) for name, default in defaults),
        )

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.positional, *self.keyword_only)
