"""The kernel of benchmarks/attention/mass_runs.py is that of the product with a few lines more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvspec_kernels.jit import nvrtc
from kvspec_kernels.jit.cuda_attention import AttentionShape
from kvspec_kernels.jit.cuda_verify import columns_and_blocks, verify_defines

pytest.importorskip("cuda.bindings")


@pytest.mark.parametrize("codec", ["uniform4", "log4"])
def test_the_changed_kernel_compiles(codec: str, tmp_path: Path) -> None:
    from attention.kvspec_runs import CODECS
    from attention.mass_runs import changed_source

    shape = AttentionShape(CODECS[codec], 64, 128, 32, 8, torch.bfloat16)
    columns, blocks = columns_and_blocks(shape, 52)
    defines = verify_defines(shape, columns, blocks) | {"PAGE_ROWS": 52}
    source = str(changed_source(tmp_path))
    assert nvrtc.compile_cubin(source, tuple(sorted(defines.items())), "sm_90a").code


def test_an_edit_that_does_not_fit_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attention import mass_runs

    monkeypatch.setattr(mass_runs, "EDITS", (("no such line", ""),))
    with pytest.raises(ValueError, match=r"has 0 times"):
        mass_runs.changed_source(tmp_path)
