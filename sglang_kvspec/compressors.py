"""List of the methods that compress what drafts read, for `sglang-kvspec compressors`."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from typing import Any

from sglang_kvspec.core.codec_names import UNTRIED_ON_GPU
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.registry import Registry
from sglang_kvspec.core.seams import CODECS, SCORERS
from sglang_kvspec.core.sglang_releases import UNTESTED_NAME
from sglang_kvspec.planning.compressor_choice import ALL_TOKENS
from sglang_kvspec.planning.measured_compressors import DRAFT_LEN, MEASURED, PLACES


def list_methods() -> list[dict[str, Any]]:
    """Return what is known of every scorer and codec, built in or of another package: name, kind,
    flag, paper, keeps, cost, options with their defaults, and what was measured. `problem` takes
    the place of all but name, kind and flag for a method that cannot be imported."""
    return [
        *(_described("scorer", SCORERS, name) for name in SCORERS.names()),
        *(_described("codec", CODECS, name) for name in CODECS.names()),
    ]


def _title_of(codec: Any) -> str:
    """Return the first line of the docstring of a codec's module."""
    line = (sys.modules[codec.__module__].__doc__ or "").strip().partition("\n")[0]
    return line.removeprefix("Declaration of ").rstrip(".")


def _place_of(codec: Any) -> str:
    if not codec.has_kernels:
        return "on a CPU only"
    if codec.name in UNTRIED_ON_GPU:
        return f"on a CPU, on a GPU with {UNTESTED_NAME}=1"
    return "on a GPU and a CPU"


def _described(kind: str, registry: Registry, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "kind": kind, "flag": f"{registry.flag} {name}"}
    try:
        made = registry.load(name)
    except ConfigError as error:
        return {**found, "problem": str(error)}
    if kind == "codec":
        return {
            **found,
            "paper": _title_of(made),
            "keeps": f"all tokens, in {', '.join(map(str, made.bit_choices))} bits",
            "cost": _place_of(made),
            "options": {},
            "measured": _measured_of(ALL_TOKENS, name),
        }
    options = {
        field.name: None if field.default is MISSING else field.default
        for field in fields(made)
        if field.init
    }
    about = made.about
    return {
        **found,
        "paper": about.paper,
        "keeps": about.keeps,
        "cost": about.cost,
        "options": options,
        "measured": _measured_of(name, None),
    }


def _measured_of(scorer: str, codec: str | None) -> list[dict[str, Any]]:
    """Return what the study measured of a scorer over 4-bit anchors, or of a codec alone: for each
    budget or width, the accepted drafts of DRAFT_LEN by place."""
    return [
        {
            "bits": each.bits,
            "budget": each.budget,
            "draft_len": DRAFT_LEN,
            "accepted": dict(zip(PLACES, each.accepted, strict=True)),
        }
        for each in MEASURED
        if each.scorer == scorer and codec in (None, each.codec)
    ]
