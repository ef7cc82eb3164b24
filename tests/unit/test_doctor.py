"""The checks of `sglang-kvspec doctor`, each on a machine that fails it."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec import cli, doctor
from sglang_kvspec.doctor import Check


def test_another_python_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    check = doctor.check_python()
    assert check.found == "3.14.0"
    assert check.problem == "KVSpec needs Python 3.11 or 3.12"


def test_another_sglang_ends_the_checks(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.99")
    *_, sglang, last = doctor.diagnose([])
    assert "0.5.23 on a CPU, but SGLang 0.5.99 is installed" in sglang.problem
    assert last.found == doctor.NOT_CHECKED


def test_a_machine_without_sglang_is_told_what_to_install(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert "pip install sglang-kvspec" in doctor.check_sglang().problem


def test_the_package_has_to_be_installed(monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    assert "install it with pip" in doctor.check_plugin(on_gpu=False).problem


def test_a_package_that_is_not_installed_ends_the_checks(monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    *_, plugin, last = doctor.diagnose([])
    assert plugin.problem
    assert last.found == doctor.NOT_CHECKED


def test_a_list_of_plugins_without_this_one_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other, kvspec_cpu")
    assert "will not load kvspec:" in doctor.check_plugin(on_gpu=False).problem
    monkeypatch.setenv("SGLANG_PLUGINS", "kvspec")
    assert "will not load kvspec_cpu" in doctor.check_plugin(on_gpu=False).problem
    assert not doctor.check_plugin(on_gpu=True).problem
    monkeypatch.setenv("SGLANG_PLUGINS", "kvspec_cpu, kvspec")
    assert not doctor.check_plugin(on_gpu=False).problem


@pytest.mark.parametrize(
    ("platform", "on_gpu", "is_loaded"),
    [("other", False, False), ("kvspec_cpu", False, True), ("kvspec_cpu", True, False)],
)
def test_the_selected_platform_decides_what_is_loaded(monkeypatch, platform, on_gpu, is_loaded):
    monkeypatch.setenv("SGLANG_PLATFORM", platform)
    check = doctor.check_plugin(on_gpu=on_gpu)
    assert ("unset SGLANG_PLATFORM" not in check.problem) == is_loaded


@pytest.mark.parametrize("name", ["check_device", "check_hooks"])
def test_an_error_of_sglang_is_a_problem(monkeypatch, name):
    def fail():
        raise RuntimeError("two platforms are active")

    monkeypatch.setattr(doctor, name, fail)
    problems = [check.problem for check in doctor.diagnose([])]
    assert "RuntimeError: two platforms are active" in problems


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that makes GPUs visible, by name and compute capability."""

    def show(*found):
        def properties(index):
            name, (major, minor) = found[index]
            return SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 << 30)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    return show


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        (
            "NVIDIA H200",
            (9, 0),
            "9.0, CUDA kernels (kernels and servers were measured on this GPU)",
        ),
        ("NVIDIA GH200 480GB", (9, 0), "9.0, CUDA kernels (nothing was measured on this GPU)"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "8.0, Triton kernels (nothing was measured on this GPU)"),
        ("NVIDIA A10", (8, 6), "8.6, Triton kernels (nothing was measured on this GPU)"),
        ("NVIDIA B200", (10, 0), "10.0, Triton kernels (nothing was measured on this GPU)"),
        ("RTX 5090", (12, 0), "12.0, Triton kernels (nothing was measured on this GPU)"),
    ],
)
def test_a_gpu_is_described_with_its_kernels(gpus, name, capability, expected):
    gpus((name, capability), (name, capability))
    check = doctor.check_device()
    assert check.found == f"2 x {name}, 80 GiB each, compute capability {expected}"
    assert not check.problem


def test_every_gpu_is_judged_by_its_generation(gpus):
    gpus(("NVIDIA H200", (9, 0)), ("Tesla T4", (7, 5)))
    check = doctor.check_device()
    assert check.found.endswith("; 1 x Tesla T4, 80 GiB each, compute capability 7.5")
    assert "8.0 and later (Ampere), but GPU 1, Tesla T4, has 7.5" in check.problem


def test_gpus_of_other_vendors_are_refused(gpus, monkeypatch):
    gpus(("AMD Instinct MI300X", (9, 4)))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "NVIDIA GPUs and on CPUs only" in doctor.check_device().problem


def test_a_model_is_not_judged_on_a_device_that_cannot_serve(monkeypatch):
    broken = Check("device", "one abacus", "too slow")
    monkeypatch.setattr(doctor, "check_device", lambda: broken)
    monkeypatch.setattr(doctor, "check_hooks", lambda: Check("hooks", "applied"))
    *_, model = doctor.diagnose(["--model-path=M"])
    assert model.found == doctor.NOT_CHECKED


@pytest.mark.parametrize(
    ("arguments", "has_model"),
    [
        ([], False),
        (["--model-path", "M"], True),
        (["--model=M"], True),
        (["--tp", "2"], False),
        (["--config", "server.yaml"], True),
    ],
)
def test_a_model_is_found_in_the_arguments(arguments, has_model):
    assert doctor.has_model(arguments) == has_model


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("too old", 1)])
def test_the_exit_code_shows_failures(monkeypatch, capsys, problem, code):
    monkeypatch.setattr(doctor, "diagnose", lambda arguments: iter([Check("it", "new", problem)]))
    assert cli.main(["doctor", "--model-path", "M"]) == code
    said = capsys.readouterr().out
    assert ("cannot serve here" in said) == bool(code)
    assert problem in said


def test_plan_refuses_what_it_does_not_know():
    with pytest.raises(SystemExit) as refused:
        cli.main(["plan", "--model", "M", "--wrong"])
    assert refused.value.code == 2
