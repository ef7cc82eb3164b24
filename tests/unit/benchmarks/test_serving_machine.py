"""A machine's GPUs and compiler caches, as a benchmark run finds them."""

from __future__ import annotations

import pytest
from serving import compiled, machine

# Prints the GPU of its arguments, or all GPUs, as nvidia-smi does.
NVIDIA_SMI = """#!/bin/sh
for argument in "$@"; do
    case "$argument" in --id=*) echo "${argument#--id=}000"; exit;; esac
done
printf '1000\\n2000\\n'
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(("visible", "used"), [("2", 2000), ("", 3000)], ids=["one", "all"])
def test_only_gpus_that_servers_may_use_count(nvidia_smi, monkeypatch, visible, used):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.hbm_used_gib() == used / 1024
    assert machine.describe() == ("2000" if visible else "2 x 1000")


def test_kernels_in_either_cache_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    assert compiled.compiled_kernels() == frozenset()
    folder = tmp_path / "triton" / "ABC"
    folder.mkdir(parents=True)
    (folder / "_draft.cubin").touch()
    (folder / "_draft.json").touch()
    before = compiled.compiled_kernels()
    assert compiled.names(before) == ["_draft"]
    ops = tmp_path / ".cache" / "flashinfer" / "0.6" / "90a" / "cached_ops" / "norm"
    ops.mkdir(parents=True)
    (ops / "norm.so").touch()
    assert compiled.names(compiled.compiled_kernels() - before) == ["norm"]
