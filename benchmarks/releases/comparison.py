"""Comparison of the names that KVSpec uses with those of a release, and what breaks KVSpec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from releases.arguments import Arguments
from releases.callers import count_uses
from releases.needs import Need, OwnArguments
from releases.symbols import arguments_of, find
from releases.wheels import Wheel
from sglang_kvspec.core.sglang_releases import SUPPORTED, SUPPORTED_ON_GPU

# Releases are compared with the one that all tests run on.
REFERENCE = SUPPORTED_ON_GPU[0]
# Functions that SGLang calls in a way that no count of names can see, each with the reason.
CALLED_OTHERWISE: Mapping[str, str] = {}

Word = Literal["yes", "changed", "moved", "no", "uncalled", "unfit", "-"]
# These break KVSpec on a supported release.
BREAKS: tuple[Word, ...] = ("no", "uncalled", "unfit")


@dataclass(frozen=True, slots=True)
class Found:
    """One symbol in one release. place: index in the places of its need. arguments: None for what
    takes none. uses: places that use a hooked function, None for any other symbol."""

    place: int
    arguments: Arguments | None
    uses: int | None


@dataclass(frozen=True, slots=True)
class Cell:
    """Verdict on one symbol in one release. reason: of a break, as one clause."""

    word: Word
    reason: str = ""
    uses: int | None = None


def look_up(needs: Sequence[Need], wheel: Wheel) -> list[Found | None]:
    """Return what a wheel has for each need; None where it has nothing."""
    hooked = [need.places[0].rsplit(".", 1) for need in needs if need.kind == "hook"]
    functions = {name for owner, name in hooked if owner in wheel.files}
    methods = {name for owner, name in hooked if owner not in wheel.files}
    uses = count_uses(wheel, functions, methods) if hooked else {}
    return [_look_up(need, wheel, uses) for need in needs]


def _look_up(need: Need, wheel: Wheel, uses: Mapping[str, int]) -> Found | None:
    for index, place in enumerate(need.places):
        if (symbol := find(wheel, place)) is not None:
            args = arguments_of(wheel, symbol)
            return Found(
                index,
                None if args is None else Arguments.of(args),
                uses[place.rpartition(".")[2]] if need.kind == "hook" else None,
            )
    return None


def judge(need: Need, release: str, found: Found | None, reference: Found | None) -> Cell:
    """Return the verdict on a symbol. reference: the symbol in the release to compare with."""
    if not need.is_for(release):
        return Cell("-")
    if need.kind == "method" and reference is None and need.since == SUPPORTED[0]:
        # Our own method, which overrides none.
        return Cell("-")
    if found is None:
        return Cell("no", "does not exist")
    if found.uses == 0 and need.places[0] not in CALLED_OTHERWISE:
        return Cell("uncalled", "is never called", found.uses)
    known = found.arguments if reference is None else reference.arguments
    if need.own is not None and found.arguments is not None:
        reason = misfit(need.own, found.arguments, known or found.arguments)
        if reason is not None:
            return Cell("unfit", reason, found.uses)
    if found.arguments != known:
        return Cell("changed", uses=found.uses)
    is_moved = reference is not None and found.place != reference.place
    return Cell("moved" if is_moved else "yes", uses=found.uses)


def misfit(own: OwnArguments, target: Arguments, known: Arguments) -> str | None:
    """Return why a function of ours cannot stand in the place of `target`, as one clause; None if
    it can.

    known: arguments of the target in the reference release. Ours may give a positional argument a
    name of its own, and may take optional ones that only other releases have.
    """
    optional = set(own.optional) - set(known.names)
    for index, name in enumerate(own.positional):
        is_renamed = name not in known.names and index < len(target.positional)
        if name not in target.names and not is_renamed and name not in optional:
            return f"has no argument `{name}`, which ours names"
        if name in target.positional and target.positional.index(name) != index:
            return f"takes `{name}` at another position than ours"
    takes_any = any(each.startswith("**") for each in target.variadic)
    for name in (*own.keyword_only, *own.passed):
        if name not in target.names and name not in optional and not takes_any:
            return f"has no argument `{name}`, which ours names"
    named = {*own.positional, *own.keyword_only}
    for index, name in enumerate(target.positional):
        by_position = index < len(own.positional) or own.takes_args
        if name not in named and not by_position and not own.takes_kwargs:
            return f"takes `{name}`, which ours does not"
    for name in target.keyword_only:
        if name not in named and not own.takes_kwargs:
            return f"takes `{name}`, which ours does not"
    return None


def change(old: Found | None, new: Found | None) -> str:
    """Return how the arguments of a symbol differ between two releases; "" if they do not."""
    if old is None or new is None or old.arguments == new.arguments:
        return ""
    if old.arguments is None or new.arguments is None:
        return "another kind of object"
    before, after = old.arguments, new.arguments
    parts = [
        *_listed("gains", (*after.names, *after.variadic), (*before.names, *before.variadic)),
        *_listed("loses", (*before.names, *before.variadic), (*after.names, *after.variadic)),
    ]
    if not parts and before.defaults != after.defaults:
        return "other defaults"
    return "; ".join(parts) or "another order"


def _listed(verb: str, names: Iterable[str], others: Iterable[str]) -> list[str]:
    known = set(others)
    listed = [f"`{name}`" for name in names if name not in known]
    return [f"{verb} {', '.join(listed)}"] if listed else []
