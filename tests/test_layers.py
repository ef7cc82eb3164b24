"""Check every import statement of the project against the layers of the design."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from kvspec_testkit.imports import (
    SOURCE_ROOTS,
    Imports,
    find_cycle,
    import_graph,
    imported_names,
    is_within,
    loaded_modules,
    module_files,
    project_imports,
)

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Layer:
    """Imports that modules below a dotted prefix may have.

    internal: prefixes within this project, besides the layer itself. external: distributions
    outside the standard library; None means any but sglang, which `sglang` alone decides.
    """

    internal: tuple[str, ...] = ()
    external: tuple[str, ...] | None = ()
    sglang: bool = False


CORE = "sglang_kvspec.core"
KERNELS = "kvspec_kernels"
# Declarations of codecs: all that is known of records without torch.
SPECS = "kvspec_kernels.codecs"
_CODECS = (CORE, KERNELS, "sglang_kvspec.codecs")
# Plans of `planning` are plain data, so the pools and wires that carry them out may name them.
_MEMORY = (*_CODECS, "sglang_kvspec.planning")
_RUNTIME = (
    *_MEMORY,
    "sglang_kvspec.kv",
    "sglang_kvspec.transport",
    "sglang_kvspec.scorers",
)
_ENGINE = (*_RUNTIME, "sglang_kvspec.runtime")
_ADAPTERS = (*_ENGINE, "sglang_kvspec.engine")

LAYERS: Mapping[str, Layer] = {
    CORE: Layer(),
    "sglang_kvspec.planning": Layer((CORE, SPECS)),
    "sglang_kvspec.codecs": Layer(_CODECS, None),
    # Plain torch over one layer's tensors, on either device.
    "sglang_kvspec.scorers": Layer((CORE,), None),
    "sglang_kvspec.kv": Layer(_MEMORY, None),
    "sglang_kvspec.transport": Layer(_MEMORY, None),
    # A command above the wire, which serves the prefix stores of `kv` on a socket.
    "sglang_kvspec.transport.prefix_server": Layer(
        (*_MEMORY, "sglang_kvspec.kv", "sglang_kvspec.transport"), None
    ),
    "sglang_kvspec.runtime": Layer(_RUNTIME, None),
    # The round loop, which does not know SGLang.
    "sglang_kvspec.engine": Layer(_ENGINE, None),
    "sglang_kvspec.adapters": Layer(_ADAPTERS, None),
    "sglang_kvspec.adapters.compat": Layer(sglang=True),
    # The composition root: the only module above both adapters and hooks.
    "sglang_kvspec.composition": Layer(("sglang_kvspec.adapters", "kvspec_patches")),
    "sglang_kvspec.plugin": Layer(("sglang_kvspec",), None, sglang=True),
    # A command that answers faster than torch could be imported.
    "sglang_kvspec.cli": Layer(
        (CORE, "sglang_kvspec.planning", "sglang_kvspec.doctor", "sglang_kvspec.compressors"),
        ("rich", "matplotlib"),
    ),
    "sglang_kvspec.compressors": Layer((CORE, "sglang_kvspec.planning")),
    "sglang_kvspec.doctor": Layer(
        (*_ADAPTERS, "sglang_kvspec.adapters", "sglang_kvspec.composition"), None
    ),
    # A server of HTTP beside any SGLang server, on a machine without a GPU or torch.
    "sglang_kvspec.door": Layer((), ("aiohttp",)),
    "sglang_kvspec": Layer(),
    "kvspec_patches": Layer((*_ADAPTERS, "sglang_kvspec.adapters"), None, sglang=True),
    SPECS: Layer(),
    "kvspec_kernels.formats": Layer((SPECS,), ("torch",)),
    "kvspec_kernels.packed_format": Layer(("kvspec_kernels.formats", SPECS), ("torch",)),
    "kvspec_kernels.reference": Layer(
        ("kvspec_kernels.formats", "kvspec_kernels.packed_format", SPECS), ("torch",)
    ),
    # torch for CUDA brings cuda-bindings along.
    "kvspec_kernels.jit": Layer(
        ("kvspec_kernels.formats", "kvspec_kernels.packed_format", SPECS),
        ("torch", "triton", "cuda"),
    ),
    "kvspec_kernels.ops": Layer((KERNELS,), ("torch", "triton")),
    "kvspec_kernels": Layer((KERNELS,), ("torch", "triton")),
    # The test kit is outside the wheel. No layer above names it, so no product module may import
    # it.
    "kvspec_testkit": Layer(
        ("sglang_kvspec", "kvspec_kernels", "kvspec_patches"), None, sglang=True
    ),
    # Modules that run servers from a machine without torch.
    "kvspec_testkit.servers": Layer((), ("msgspec",)),
}


def layer_of(module: str) -> str:
    """Return the most specific layer that contains `module`. The bare package contains only
    itself."""
    fitting = [prefix for prefix in LAYERS if is_within(module, prefix)]
    found = max(fitting, key=len, default="")
    if not found or (found == "sglang_kvspec" and module != found):
        raise AssertionError(f"{module} belongs to no layer: give its folder one in LAYERS")
    return found


def violations(imports: Imports) -> list[str]:
    """Return one line for every import that its module's layer does not allow."""
    return [
        f"{module} imports {name}: {reason}"
        for module, names in sorted(imports.items())
        for name in sorted(names)
        if (reason := _objection(module, name)) is not None
    ]


def _objection(module: str, name: str) -> str | None:
    prefix = layer_of(module)
    layer = LAYERS[prefix]
    distribution = name.partition(".")[0]
    if distribution in sys.stdlib_module_names:
        return None
    if distribution in SOURCE_ROOTS:
        allowed = (prefix, *layer.internal)
        # `from sglang_kvspec import adapters` also names the bare package, which is empty.
        if name in SOURCE_ROOTS and any(is_within(other, name) for other in allowed):
            return None
        if any(is_within(name, other) for other in allowed):
            return None
        return f"{prefix} may import {', '.join(layer.internal) or 'nothing above itself'}"
    if distribution == "sglang":
        if layer.sglang:
            return None
        return "sglang belongs in adapters/compat/, patches/ and plugin.py"
    if layer.external is not None and distribution not in layer.external:
        return f"{prefix} may import {', '.join(('the standard library', *layer.external))} only"
    return None


def reachable(start: str, imports: Imports) -> frozenset[str]:
    """Return all modules that importing `start` loads, through the project's own modules."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        waiting.extend([*imports.get(name, ()), *([parent] if parent else [])])
    return frozenset(seen)


def test_every_import_points_down() -> None:
    found = violations(project_imports())
    assert not found, "\n" + "\n".join(found)


def test_no_module_imports_itself_through_others() -> None:
    """Count late imports and imports for type checking, too."""
    assert not (cycle := find_cycle(import_graph())), " imports ".join(cycle)


def test_no_module_escapes_the_walk() -> None:
    modules = module_files()
    assert {"sglang_kvspec.core.config", "sglang_kvspec.plugin", "kvspec_patches"} <= set(modules)
    for module in modules:
        layer_of(module)


@pytest.mark.parametrize(
    "layer",
    [CORE, SPECS, "sglang_kvspec.planning", "kvspec_testkit.servers", "sglang_kvspec.door"],
)
def test_pure_layers_do_not_reach_torch_or_sglang(layer: str) -> None:
    imports = project_imports()
    for module in (name for name in imports if is_within(name, layer)):
        loaded = {name.partition(".")[0] for name in reachable(module, imports)}
        assert not loaded & {"torch", "triton", "sglang"}, module


def test_a_prefix_server_starts_without_torch() -> None:
    """The modules import torch for type checking only, so that the command starts fast."""
    code = "import sys, sglang_kvspec.transport.prefix_server.__main__; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "sglang_kvspec.kv.prefix_store.store" in loaded
    assert not {"torch", "triton", "sglang"} & set(loaded)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sglang_kvspec.core.config", "from sglang_kvspec.codecs import base"),
        ("sglang_kvspec.core.config", "import torch"),
        ("sglang_kvspec.planning.rounds", "import torch.nn"),
        ("sglang_kvspec.planning.rounds", "from sglang_kvspec.kv.geometry import KVGeometry"),
        ("sglang_kvspec.codecs.base", "from ..kv import geometry"),
        ("sglang_kvspec.codecs.base", "def late():\n    from sglang.srt import utils"),
        ("sglang_kvspec.kv.anchors", "from sglang_kvspec import runtime"),
        ("sglang_kvspec.kv.anchors", "from .. import runtime"),
        ("sglang_kvspec.engine.loop", "import sglang.srt.managers.scheduler"),
        ("sglang_kvspec.engine.loop", "importlib.import_module('sglang.srt.utils')"),
        ("sglang_kvspec.engine.loop", "if TYPE_CHECKING:\n    from sglang import Engine"),
        ("sglang_kvspec.adapters.pool", "from sglang.srt.mem_cache.memory_pool import KVCache"),
        ("sglang_kvspec.adapters.pool", "def late():\n    from sglang.srt import environ"),
        ("sglang_kvspec.adapters.compat.pool", "from sglang_kvspec.adapters import pool"),
        ("sglang_kvspec.adapters.compat.pool", "import torch"),
        ("sglang_kvspec.adapters.worker", "import kvspec_patches"),
        ("sglang_kvspec.adapters.worker", "from sglang_kvspec.plugin import register"),
        ("kvspec_testkit.servers.server_process", "import sglang"),
        ("sglang_kvspec.adapters.worker", "from kvspec_testkit.runtime import states"),
        ("sglang_kvspec.plugin", "import kvspec_testkit"),
        ("kvspec_kernels.ops.encode", "from kvspec_testkit.kernels import cases"),
        ("kvspec_patches.vocab_mask", "import kvspec_testkit"),
        ("sglang_kvspec.adapters.worker", "from sglang_kvspec import composition"),
        ("sglang_kvspec.composition", "from sglang_kvspec.runtime import ranks"),
        ("sglang_kvspec.composition", "from sglang.srt import plugins"),
        ("kvspec_patches.http_app", "from sglang_kvspec.composition import verify_hooks"),
        ("sglang_kvspec", "import torch"),
        ("kvspec_kernels.formats", "from kvspec_kernels.reference import log4"),
        ("kvspec_kernels.reference.log4", "from kvspec_kernels.ops import encode"),
        ("kvspec_kernels.ops.encode", "from sglang_kvspec.core import errors"),
        ("kvspec_kernels.ops.encode", "import numpy"),
    ],
)
def test_the_checker_catches_a_forbidden_import(module: str, source: str) -> None:
    assert violations({module: imported_names(source, module, is_package=False)}), source


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sglang_kvspec.engine.loop", "from . import batch\nimport torch, heapq"),
        ("sglang_kvspec.kv.anchors", "from sglang_kvspec.codecs.base import Codec"),
        ("sglang_kvspec.adapters.compat.pool", "from sglang.srt.mem_cache import memory_pool"),
        ("sglang_kvspec.adapters.pool", "from sglang_kvspec.adapters.compat.environ import envs"),
        ("kvspec_kernels.ops.encode", "from kvspec_kernels.jit import encode\nimport triton"),
    ],
)
def test_the_checker_lets_a_downward_import_pass(module: str, source: str) -> None:
    assert not violations({module: imported_names(source, module, is_package=False)})


@pytest.mark.parametrize(
    "closing",
    [
        "from a.first import VALUE",
        "from a import first",
        "from . import first",
        "import a.first",
        "def late():\n    import a.first",
        "if TYPE_CHECKING:\n    from .first import Value",
        "importlib.import_module('a.first')",
        # b/__init__.py imports a.first.
        "from b.other import VALUE",
        "from b import VALUE",
    ],
)
def test_a_cycle_is_found(closing: str) -> None:
    modules = {"a": "", "a.first": "from a import last", "a.last": closing}
    modules |= {"b": "import a.first", "b.other": ""}
    graph = {
        module: loaded_modules(source, module, modules, is_package=module in ("a", "b"))
        for module, source in modules.items()
    }
    cycle = find_cycle(graph)
    assert {"a.first", "a.last"} <= set(cycle)
    assert all(after in graph[before] for before, after in pairwise(cycle))


def test_modules_of_one_package_are_no_cycle_with_it() -> None:
    modules = {"a": "from a.low import VALUE", "a.low": "", "a.high": "from a import low"}
    graph = {
        module: loaded_modules(source, module, modules, is_package=module == "a")
        for module, source in modules.items()
    }
    assert graph == {"a": {"a.low"}, "a.low": set(), "a.high": {"a.low"}}
    assert not find_cycle(graph)


def test_a_folder_without_a_layer_fails() -> None:
    with pytest.raises(AssertionError, match="no layer"):
        violations({"sglang_kvspec.helpers.misc": frozenset({"os"})})


def test_transitive_torch_is_seen() -> None:
    imports = {
        "sglang_kvspec.planning.rounds": frozenset({"sglang_kvspec.core.ids"}),
        "sglang_kvspec.core.ids": frozenset({"torch"}),
    }
    assert "torch" in reachable("sglang_kvspec.planning.rounds", imports)


def test_source_roots_and_tests_are_not_packages() -> None:
    """A package named kernels or sglang on sys.path would shadow the one that SGLang imports."""
    roots = [ROOT / name / "__init__.py" for name in ("kernels", "patches", "testkit")]
    found = [path for path in roots if path.exists()]
    found += sorted((ROOT / "tests").rglob("__init__.py"))
    assert not found
