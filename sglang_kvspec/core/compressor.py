"""The value of --kvspec-compressor: a scorer's name and its options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flag_kinds import Kind
from sglang_kvspec.core.registry import Registry

# The method that a study found best.
AUTO_COMPRESSOR = "auto"
# Units in which drafts read what a scorer keeps.
Unit = Literal["pages", "tokens"]
# Tokens that compete for the budget. head: those of one layer and KV head, so that all heads read
# equally many. layer: those of all KV heads of a layer. model: those of all layers. same: all heads
# of all layers read the same tokens, by the sum of their scores. With several ranks, only heads of
# one rank compete.
Allocation = Literal["head", "layer", "model", "same"]
# Share of the pages of a server with keep_anchors=false that have room for anchors, besides those
# that drafts read of prompts: for generated tokens, whose anchors all stay.
GENERATED_SHARE = 0.1
_OPTION = re.compile(r"([a-z_]+)=([^,=]+)")


@dataclass(frozen=True, slots=True)
class Compressor:
    """A parsed value. by: units that drafts read. heads: heads among which tokens compete for the
    budget, None for the scorer's own choice. keep_anchors: False frees the anchors of pages that no
    draft reads. options: the scorer's, by name, not converted yet."""

    name: str
    by: Unit
    heads: Allocation | None
    keep_anchors: bool
    options: dict[str, str]


def parse_compressor(text: str) -> Compressor:
    """Parse NAME[:key=value,...]. Raises ConfigError for text of another form, an option that is
    given twice, wrong values of `by`, `heads` and `keep_anchors`, and for keep_anchors=false where
    heads read different pages or single tokens."""
    name, colon, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        match = _OPTION.fullmatch(part)
        if match is None:
            raise ConfigError(
                "--kvspec-compressor must be NAME or NAME:key=value,key=value, got "
                f"{text!r} with the part {part!r}"
            )
        key, value = match.groups()
        if key in options:
            raise ConfigError(f"--kvspec-compressor {text}: the option {key} is given twice")
        options[key] = value
    by, heads = options.pop("by", "pages"), options.pop("heads", None)
    _check_word(text, "by", by, get_args(Unit))
    if heads is not None:
        _check_word(text, "heads", heads, get_args(Allocation))
    keep = options.pop("keep_anchors", "true")
    _check_word(text, "keep_anchors", keep, ("true", "false"))
    if keep == "false":
        for key, value, allowed in (("by", by, "pages"), ("heads", heads or "same", "same")):
            if value != allowed:
                raise ConfigError(
                    f"--kvspec-compressor {text}: keep_anchors=false cannot be combined with "
                    f"{key}={value} (allowed: {allowed}): a page's anchors are freed once no head "
                    "reads the page"
                )
        heads = "same"
    return Compressor(name, by, heads, keep == "true", options)  # type: ignore[arg-type]


def _check_word(text: str, key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"--kvspec-compressor {text}: {key} must be one of {', '.join(allowed)}, got {value!r}"
        )


@dataclass(frozen=True, slots=True)
class CompressorText(Kind):
    """AUTO_COMPRESSOR, or the name of a scorer with options, see parse_compressor(). others: a seam
    whose names people may take for scorers, and which another flag chooses."""

    registry: Registry
    others: Registry

    def allows(self, value: object) -> bool:
        """Raises ConfigError for text that is not a name with options."""
        return isinstance(value, str) and (
            value == AUTO_COMPRESSOR or parse_compressor(value).name in self.registry.names()
        )

    def demand(self, value: object) -> str:
        name = str(value).partition(":")[0]
        names = ", ".join((AUTO_COMPRESSOR, *self.registry.names()))
        if name in self.others.names():
            return f"must be one of {names}; {name} is a codec: write {self.others.flag} {name}"
        return f"must be one of {names}, with options as in {self.metavar}"

    def allowed(self, default: object) -> str:
        ours = ", ".join(f"`{name}`" for name in sorted(self.registry.built_in))
        return f"`{AUTO_COMPRESSOR}`, {ours}; more by entry points of `{self.registry.group}`"
