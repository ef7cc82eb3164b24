"""Codecs by the names that --kvspec-codec takes."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch

from kvspec_kernels.codecs import CodecSpec
from kvspec_kernels.formats import (
    EXACT_DTYPES,
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    MAX_PAGE_SIZE,
    MIN_HEAD_DIM,
    PAGE_STEP,
    FormatError,
)
from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.codecs.record_codec import RecordCodec
from sglang_kvspec.core.codec_names import UNTRIED_ON_GPU, codec_names, load_codec
from sglang_kvspec.core.config import Target
from sglang_kvspec.core.errors import ConfigError


def find_codec(name: str) -> type[CodecSpec]:
    """Return the declaration of the codec `name`. Raises ConfigError where there is none."""
    found = load_codec(name)
    if not (isinstance(found, type) and issubclass(found, CodecSpec)):
        raise ConfigError(
            f"--kvspec-codec {name}: the entry point must lead to a subclass of "
            f"kvspec_kernels.codecs.CodecSpec, got {found!r}"
        )
    return found


def tried_on_gpu() -> list[str]:
    """Return the names of codecs that GPU servers take without a switch."""
    return [
        name
        for name in codec_names()
        if find_codec(name).has_kernels and name not in UNTRIED_ON_GPU
    ]


def make_codec(
    name: str,
    *,
    target: Target,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    anchor_bits: int | None = None,
    debug: bool = False,
    packs: bool = False,
) -> Codec:
    """Make the codec `name` with its default settings, bound to a model's sizes. anchor_bits: the
    first of the codec's bit_choices unless given. packs: residuals outside of the KV cache are
    packed; the target must be exact.

    Raises ConfigError naming the flag or model property, its value and what is allowed.
    """
    spec = find_codec(name)
    _check_choice("--kvspec-target", target, get_args(Target))
    check_page_size(page_size)
    _check_multiple("the model's head size", head_dim, HEAD_DIM_STEP, MIN_HEAD_DIM, MAX_HEAD_DIM)
    if dtype not in EXACT_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in EXACT_DTYPES)
        raise ConfigError(f"the KV cache dtype must be one of {allowed}, got {dtype}")
    settings = spec.for_page(page_size, _checked_bits(spec, anchor_bits))
    assert target == "exact" or not packs, "only residuals of the target exact are packed"
    try:
        codec = RecordCodec(settings, target, page_size, head_dim, dtype, debug)
    except FormatError as error:
        raise ConfigError(f"--kvspec-codec {name}: {error}") from error
    if not packs:
        return codec
    try:
        return replace(codec, packs=True)
    except FormatError as error:
        raise ConfigError(f"--kvspec-exact-residual packed: {error}") from error


def _checked_bits(spec: type[CodecSpec], anchor_bits: int | None) -> int:
    if anchor_bits is None:
        return spec.bit_choices[0]
    if anchor_bits not in spec.bit_choices:
        allowed = ", ".join(map(str, spec.bit_choices))
        raise ConfigError(
            f"--kvspec-anchor-bits must be one of {allowed} for --kvspec-codec {spec.name}, "
            f"got {anchor_bits!r}"
        )
    return anchor_bits


def check_page_size(page_size: int) -> None:
    """Raise ConfigError unless codecs can group pages of this many tokens."""
    _check_multiple("--page-size", page_size, PAGE_STEP, PAGE_STEP, MAX_PAGE_SIZE)


def _check_choice(flag: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}")


def _check_multiple(what: str, value: int, step: int, least: int, most: int) -> None:
    if not (least <= value <= most and value % step == 0):
        raise ConfigError(
            f"{what} must be a multiple of {step} from {least} to {most} for a KVSpec codec, "
            f"got {value}"
        )
