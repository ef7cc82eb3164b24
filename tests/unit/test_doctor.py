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


@pytest.mark.parametrize(("capability", "is_served"), [((9, 0), True), ((8, 0), False)])
def test_a_gpu_is_judged_by_its_generation(monkeypatch, capability, is_served):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    properties = SimpleNamespace(name="GPU X", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    check = doctor.check_device()
    assert check.found == "2 x GPU X, 80 GiB each"
    assert (not check.problem) == is_served
    assert is_served or "compute capability 9.0 (Hopper)" in check.problem


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
