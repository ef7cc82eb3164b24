"""Fused and assembled arithmetic for Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

Values = tuple[torch.Tensor, ...]


def patch_interpreter() -> None:
    """Give the interpreter exact fused multiply-adds and the assembly of the kernels.

    Results of approximate instructions are off by as much as a GPU's may be, some up and some down.
    Any other assembly raises NotImplementedError.
    """
    builder = interpreter.InterpreterBuilder
    builder.create_fma = _create_fma
    builder.create_inline_asm = _create_inline_asm


def hasten_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip what costs most in kernels of thousands of operations.

    That is overflow checks of integers, which see tensors of one element only, and the replacement
    of triton.language in every call of a function, which the kernel's launch has already done.
    """
    builder, function = interpreter.interpreter_builder, interpreter.InterpretedFunction
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", options)
    replace_language = interpreter._patch_lang
    replaced: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = {id(value) for value in self.fn.__globals__.values()}
        needed = seen & {id(interpreter.tl), id(interpreter.tl.core)}
        if not needed <= replaced:
            replace_language(self.fn)
            replaced.update(needed)
        return self.rewrite()(*args, **kwargs)

    def replace_again(fn: Any) -> Any:
        # A launch ended by restoring the language.
        replaced.clear()
        return replace_language(fn)

    monkeypatch.setattr(function, "__call__", call)
    monkeypatch.setattr(interpreter, "_patch_lang", replace_again)


def exact_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c of fp32 tensors, rounded once."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # Error of the sum (Knuth): tells whether fp64 had to round, and in which direction.
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & error.isfinite() & (bits & 1 == 0)
    # Round to odd, so that the second rounding, to fp32, gives the result of a single one.
    return torch.where(inexact, bits + step, bits).view(torch.float64).float()


def dot_by_rows(
    builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    """Multiply as InterpreterBuilder.create_dot() does, with rows that do not depend on each other,
    as those of a GPU's matrix instruction: products are added in fp64, and rounded once. On some
    CPUs numpy adds fp32 in another order for one row than for many."""
    wide = np.float64 if d.data.dtype.kind == "f" else d.data.dtype
    total = np.matmul(a.data, b.data, dtype=wide) + d.data
    return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


def _reciprocal(values: Values) -> torch.Tensor:
    return _nudged((1 / values[0].double()).float())


def _logarithm(values: Values) -> torch.Tensor:
    exact = values[0].double().log2()
    sign = 1 - 2 * (values[0].view(torch.int32) & 1)
    return (exact + sign * 2.0**-22 * exact.abs().clamp_min(1)).float()


def _saturated_fma(values: Values) -> torch.Tensor:
    return exact_fma(*values).nan_to_num(0.0).clamp(0, 1)


def _sign_bytes(values: Values) -> torch.Tensor:
    signs = [value.view(torch.int32).long() >> 31 & 1 for value in values]
    word = sum(sign << 8 * byte + 7 for byte, sign in enumerate(signs))
    assert isinstance(word, torch.Tensor)
    return torch.where(word >= 2**31, word - 2**32, word).int()


def _swap_odd_bytes(values: Values) -> torch.Tensor:
    swapped = values[0].view(torch.uint8).reshape(-1, 4)[:, [0, 3, 2, 1]]
    return swapped.contiguous().view(torch.int32).reshape(values[0].shape)


def _nudged(value: torch.Tensor) -> torch.Tensor:
    bits = value.view(torch.int32)
    return (bits + 1 - 2 * (bits & 1)).view(torch.float32)


def _values_of_bytes(values: Values) -> torch.Tensor:
    words, scales, offsets, selectors = values
    places = selectors[..., None] >> torch.tensor([0, 8]) & 15
    bytes_ = words[..., None] >> 8 * places & 255
    scale, offset = (pairs.view(torch.bfloat16).float() for pairs in (scales, offsets))
    whole = (bytes_.flatten(-2).float() - 8) / 64
    return exact_fma(whole, scale, offset).bfloat16().view(torch.int32)


def _quarter_of_pairs(values: Values) -> torch.Tensor:
    quarters = values[0].view(torch.bfloat16).float() * 0.25
    return quarters.bfloat16().view(torch.int32)


# Each instruction, by a part of its assembly, in which one space stands between words.
INSTRUCTIONS: dict[str, Callable[[Values], torch.Tensor]] = {
    "rcp.approx.ftz.f32": _reciprocal,
    "lg2.approx.ftz.f32": _logarithm,
    "fma.rn.sat.f32": _saturated_fma,
    "prmt.b32 $0, $1, $1, 0x1230;": _swap_odd_bytes,
    "prmt.b32 x, $1, $2, 0x0073;": _sign_bytes,
    "prmt.b32 pair, $1, 0, $4; mov.b32 factor, 0x7F007F00; mov.b32 shift, 0xBE00BE00; "
    "fma.rn.bf16x2 whole, pair, factor, shift; fma.rn.bf16x2 $0, whole, $2, $3;": _values_of_bytes,
    "mov.b32 factor, 0x3E803E80; mov.b32 shift, 0x80008000; "
    "fma.rn.bf16x2 $0, $1, factor, shift;": _quarter_of_pairs,
}


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    result = exact_fma(*_broadcast(x, y, z))
    return interpreter.TensorHandle(result.numpy(), z.dtype.scalar)


def _create_inline_asm(
    self: Any, assembly: str, constraints: str, values: Any, types: Any, pure: bool, pack: int
) -> Any:
    spaced = " ".join(assembly.split())
    found = [run for name, run in INSTRUCTIONS.items() if name in spaced]
    if len(found) != 1:
        raise NotImplementedError(
            f"INSTRUCTIONS must have exactly one entry for {assembly!r}, found {len(found)}"
        )
    result = found[0](_broadcast(*values))
    (dtype,) = types
    return _Results(interpreter.TensorHandle(result.numpy(), dtype.scalar))


class _Results:
    def __init__(self, *handles: Any) -> None:
        self.handles = handles

    def get_result(self, index: int) -> Any:
        return self.handles[index]


def _broadcast(*handles: Any) -> Values:
    tensors = [torch.from_numpy(handle.data.copy()) for handle in handles]
    together = torch.broadcast_tensors(*tensors)  # type: ignore[no-untyped-call]
    return tuple(tensor.contiguous() for tensor in together)
