"""Fields of a payload, one after the other."""

from __future__ import annotations

import torch

from kvspec_kernels.formats import Field, RecordLayout


def lay_out(*specs: tuple[str, tuple[int, ...], torch.dtype]) -> RecordLayout:
    """Lay out fields (name, shape, dtype) in this order and without gaps. Wider dtypes must come
    first, so that every field is aligned."""
    fields: list[Field] = []
    offset = 0
    for name, shape, dtype in specs:
        assert offset % dtype.itemsize == 0, (name, offset)
        fields.append(Field(name, offset, shape, dtype))
        offset += fields[-1].nbytes
    return RecordLayout(tuple(fields), offset)
