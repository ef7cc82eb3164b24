"""Find the Triton functions that a codec declares by name."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from kvspec_kernels.codecs.fields import FormatError


@cache
def kernel_function(name: str) -> Any:
    """Import the @triton.jit function `name`, written as "module:function". A kernel takes it as a
    constexpr argument, which compiles it in place. Raises FormatError if it cannot be imported."""
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise FormatError(
            f"a codec's Triton function {name!r} cannot be imported: {error}"
        ) from error
