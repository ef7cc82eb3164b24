"""Codecs by the names that --kvspec-codec takes."""

from __future__ import annotations

from typing import get_args

import torch

from kvspec_kernels.formats import (
    EXACT_DTYPES,
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    MAX_PAGE_SIZE,
    MIN_HEAD_DIM,
    PAGE_STEP,
    Log4Settings,
    Uniform4Settings,
)
from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.codecs.log4 import Log4Codec
from sglang_kvspec.codecs.uniform4 import Uniform4Codec
from sglang_kvspec.core.config import CodecName, Target
from sglang_kvspec.core.errors import ConfigError


def make_codec(
    name: CodecName,
    *,
    target: Target,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    debug: bool = False,
) -> Codec:
    """The codec `name` with its default settings, bound to a model's sizes.

    Raises ConfigError naming the flag or model property, its value and what is allowed.
    """
    _check_choice("--kvspec-codec", name, get_args(CodecName))
    _check_choice("--kvspec-target", target, get_args(Target))
    check_page_size(page_size)
    _check_multiple("the model's head size", head_dim, HEAD_DIM_STEP, MIN_HEAD_DIM, MAX_HEAD_DIM)
    if dtype not in EXACT_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in EXACT_DTYPES)
        raise ConfigError(f"the KV cache dtype must be one of {allowed}, got {dtype}")
    if name == "uniform4":
        return Uniform4Codec(
            target, page_size, head_dim, dtype, Uniform4Settings.for_page(page_size), debug
        )
    return Log4Codec(target, page_size, head_dim, dtype, Log4Settings.for_page(page_size), debug)


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
