"""The command `sglang-kvspec doctor`: can this machine, this SGLang and a model be served?"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import metadata

from sglang_kvspec.adapters.activation import check_sglang_version, cpu_platform_is_active
from sglang_kvspec.core.errors import KVSpecError
from sglang_kvspec.core.units import GIB

PYTHON = ((3, 11), (3, 12))
# Entry points that SGLang finds this package by.
ENTRY_POINTS = {"sglang.srt.plugins": "kvspec", "sglang.srt.platforms": "kvspec_cpu"}
NOT_CHECKED = "not checked, because of the problem above"


@dataclass(frozen=True, slots=True)
class Check:
    """One condition of serving. found: what is here. problem: why it does not do and what to do
    about it; empty where it does."""

    name: str
    found: str
    problem: str = ""


def diagnose(arguments: Sequence[str]) -> Iterator[Check]:
    """Yield the checks of this machine as they end, then those of a model on it.

    arguments: those of `python -m sglang.launch_server`; without --model-path no model is checked.
    Hooks of --kvspec are applied to SGLang in this process.
    """
    yield check_python()
    for check in (check_sglang, lambda: check_plugin(on_gpu=has_gpu())):
        found = check()
        yield found
        if found.problem:
            yield Check("machine and model", NOT_CHECKED)
            return
    device = _quietly("device", check_device)
    yield device
    yield check_memory()
    yield _quietly("hooks", check_hooks)
    if not has_model(arguments):
        yield Check("model", "none given: add --model-path MODEL and the flags of the server")
    elif device.problem:
        yield Check("model", NOT_CHECKED)
    else:
        yield check_server(arguments)


def _quietly(name: str, check: Callable[[], Check]) -> Check:
    """Run a check without the warnings of SGLang's imports. An error that ends it is a problem."""
    try:
        with redirect_stderr(io.StringIO()):
            return check()
    except Exception as error:
        return Check(name, "SGLang cannot be loaded here", _sentence_of(error))


def _sentence_of(error: Exception) -> str:
    (first, *_) = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def check_python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in PYTHON:
        return Check("Python", found)
    allowed = " or ".join(".".join(map(str, version)) for version in PYTHON)
    return Check("Python", found, f"KVSpec needs Python {allowed}")


def check_sglang() -> Check:
    try:
        found = metadata.version("sglang")
        check_sglang_version(on_gpu=has_gpu())
    except metadata.PackageNotFoundError:
        return Check("SGLang", "not installed", "install SGLang: pip install sglang-kvspec")
    except KVSpecError as error:
        return Check("SGLang", found, str(error))
    return Check("SGLang", found)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def check_plugin(*, on_gpu: bool) -> Check:
    """Check that SGLang will load this package as a plug-in. Without a GPU it also needs this
    package's platform."""
    platform, allowed = os.environ.get("SGLANG_PLATFORM"), os.environ.get("SGLANG_PLUGINS")
    if platform and (on_gpu or platform != "kvspec_cpu"):
        # SGLang skips all plug-ins of a package that has a platform which was not selected.
        return Check(
            "plug-in",
            f"SGLANG_PLATFORM={platform}",
            "SGLang will not load kvspec: unset SGLANG_PLATFORM",
        )
    for group, name in ENTRY_POINTS.items():
        if name not in {entry.name for entry in metadata.entry_points(group=group)}:
            return Check(
                "plug-in",
                f"no entry point {name} in group {group}",
                "SGLang cannot find KVSpec: install it with pip, not by PYTHONPATH alone",
            )
        if on_gpu and name == "kvspec_cpu":
            continue
        if allowed and name not in {part.strip() for part in allowed.split(",")}:
            return Check(
                "plug-in",
                f"SGLANG_PLUGINS={allowed}",
                f"SGLang will not load {name}: add {name} to SGLANG_PLUGINS, or unset "
                "SGLANG_PLUGINS",
            )
    return Check("plug-in", f"SGLang finds {' and '.join(ENTRY_POINTS.values())}")


def check_device() -> Check:
    from sglang_kvspec.adapters.gpus import check_gpus, describe_gpus

    if has_gpu():
        try:
            found = describe_gpus()
        except KVSpecError as error:
            return Check("device", "a GPU of another vendor", str(error))
        try:
            check_gpus()
        except KVSpecError as error:
            return Check("device", found, str(error))
        return Check("device", found)
    if not cpu_platform_is_active():
        return Check(
            "device",
            "no NVIDIA GPU, and another platform of SGLang is active",
            "unset SGLANG_USE_CPU_ENGINE, or uninstall the other platform, to serve on the CPU",
        )
    return Check("device", "no GPU: KVSpec serves on the CPU in plain torch, for development")


def check_memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.total / GIB:.0f} GiB in total, {memory.available / GIB:.0f} GiB free"
    return Check("host memory", found)


def check_hooks() -> Check:
    """Apply every hook of --kvspec to SGLang."""
    from sglang_kvspec.composition import num_hooks, register_everything, register_flags

    try:
        register_flags()
        register_everything(takes_requests=True)
    except KVSpecError as error:
        return Check("hooks", "not all applied", str(error))
    return Check("hooks", f"all {num_hooks()} are applied to SGLang")


def has_model(arguments: Sequence[str]) -> bool:
    # A configuration file may name the model.
    names = ("--model-path", "--model", "--config")
    return any(argument.partition("=")[0] in names for argument in arguments)


def check_server(arguments: Sequence[str]) -> Check:
    """Run the checks of a server's start, up to where it would read weights."""
    from sglang_kvspec.adapters.compat.server_args import prepare_server_args

    given = [*arguments] if "--kvspec" in arguments else [*arguments, "--kvspec"]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            server = prepare_server_args(given)
    except SystemExit:
        (*_, last) = said.getvalue().strip().splitlines() or ["SGLang refused the arguments"]
        return Check("server", " ".join(given), last.partition("error: ")[2] or last)
    except Exception as error:
        return Check("server", " ".join(given), _sentence_of(error))
    return Check("server", f"{server.model_path} can be served")
