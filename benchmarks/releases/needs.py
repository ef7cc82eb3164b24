"""Names of SGLang that KVSpec uses: targets of hooks, imports, and methods that adapters override.

Nothing here imports SGLang. Hooks are read from their table, everything else from syntax trees.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kvspec_patches.hook import Hook
from releases.arguments import Arguments
from releases.imports import imported_names, own_names
from sglang_kvspec.core.sglang_releases import SUPPORTED, parse_version

# The folders and files in which SGLang may be imported, and those that subclass what compat gives.
IMPORTERS = ("sglang_kvspec/adapters/compat", "patches/kvspec_patches", "sglang_kvspec/plugin.py")
ADAPTERS = "sglang_kvspec/adapters"

Kind = Literal["hook", "import", "method"]

# Methods that adapters override on some releases only: the first release that calls them, and the
# first that does not; None for no end.
_CACHE = "sglang.srt.mem_cache.radix_cache.RadixCache"
_SENDER = "sglang.srt.disaggregation.base.conn.BaseKVSender"
_PLATFORM = "sglang.srt.platforms.cpu.CpuDeviceMixin"
_WORKER = "sglang.srt.speculative.base_spec_worker.BaseSpecWorker"
METHOD_RELEASES: dict[str, tuple[str, str | None]] = {
    # Until 0.5.16, the hook prefix_close calls it.
    f"{_CACHE}.release_host_resources": ("0.5.17", None),
    f"{_CACHE}.cache_finished_req": (SUPPORTED[0], "0.5.21"),
    f"{_CACHE}.claim_kv_row": ("0.5.21", None),
    f"{_CACHE}.insert_req": ("0.5.21", "0.5.22"),
    f"{_CACHE}.checkpoint": ("0.5.22", None),
    f"{_CACHE}.prefix_device_indices": ("0.5.22", None),
    f"{_CACHE}.free_kv_row": ("0.5.21", None),
    # Until 0.5.16, the hook chunk_tokens gives what an argument is for.
    f"{_SENDER}.send": ("0.5.17", None),
    f"{_PLATFORM}.get_mha_kv_pool_cls": (SUPPORTED[0], "0.5.22"),
    f"{_PLATFORM}.get_kv_pool_cls": ("0.5.22", None),
    f"{_WORKER}.update_weights_from_disk": (SUPPORTED[0], "0.5.21"),
    f"{_WORKER}.update_weights_from_ipc": (SUPPORTED[0], "0.5.21"),
}


@dataclass(frozen=True, slots=True)
class OwnArguments:
    """Arguments that a function of ours takes where SGLang calls it.

    optional: those with a default. passed: names that a hook itself passes on to the function which
    it hooks.
    """

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    takes_args: bool
    takes_kwargs: bool
    optional: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()

    @classmethod
    def of_hook(cls, hook: Hook) -> OwnArguments:
        """Return the arguments without the original function or result, which comes first."""
        (node,) = ast.parse(inspect.getsource(hook.function)).body
        assert isinstance(node, ast.FunctionDef)
        gets_more = hook.kind not in ("before", "replace")
        original = node.args.args[0].arg if gets_more else ""
        return cls.of(node, skipped=int(gets_more), passed=_passed_to(original, node))

    @classmethod
    def of(
        cls, node: ast.FunctionDef, *, skipped: int = 0, passed: tuple[str, ...] = ()
    ) -> OwnArguments:
        args = Arguments.of(node.args)
        return cls(
            args.positional[skipped:],
            args.keyword_only,
            node.args.vararg is not None,
            node.args.kwarg is not None,
            tuple(name for name, _ in args.defaults),
            passed,
        )


def _passed_to(original: str, hook: ast.FunctionDef) -> tuple[str, ...]:
    """Return the names that a hook writes out in calls of the original function, as keywords or as
    keys of a dictionary that is spread."""
    names: set[str] = set()
    for call in ast.walk(hook):
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) == original):
            continue
        for keyword in call.keywords:
            if keyword.arg is not None:
                names.add(keyword.arg)
                continue
            for spread in ast.walk(keyword.value):
                if isinstance(spread, ast.Dict):
                    names.update(
                        ast.literal_eval(k) for k in spread.keys if isinstance(k, ast.Constant)
                    )
    return tuple(sorted(names))


@dataclass(frozen=True, slots=True)
class Need:
    """One symbol. places: dotted names, of which one must exist. users: modules that use it.
    own: arguments of the function of ours that SGLang calls in its place. since, until: as in a
    row of hooks.py."""

    kind: Kind
    places: tuple[str, ...]
    users: tuple[str, ...]
    own: OwnArguments | None = None
    since: str = SUPPORTED[0]
    until: str | None = None

    def is_for(self, release: str) -> bool:
        """Return True if KVSpec needs the symbol on a release. A release before the first supported
        one is asked for what the first supported one needs."""
        version = max(parse_version(release), parse_version(SUPPORTED[0]))
        is_over = self.until is not None and version >= parse_version(self.until)
        return version >= parse_version(self.since) and not is_over


def all_needs(hooks: Iterable[Hook], root: Path) -> list[Need]:
    """Return every need of the hooks and of the sources below `root`."""
    return [*needs_of_hooks(hooks), *needs_of_imports(root), *needs_of_methods(root)]


def needs_of_hooks(hooks: Iterable[Hook]) -> list[Need]:
    """Return one need for each row of the table of hooks."""
    return [
        Need(
            "hook", (hook.target,), (hook.name,), OwnArguments.of_hook(hook), hook.since, hook.until
        )
        for hook in hooks
    ]


def needs_of_imports(root: Path) -> list[Need]:
    """Return one need for each name that is imported from SGLang.

    Names that a module probes for with `getattr` or `in` are no needs: the module works with and
    without them.
    """
    users: dict[tuple[str, ...], list[str]] = {}
    for importer in IMPORTERS:
        path = root / importer
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            user = f"{file.parent.name}/{file.stem}"
            for _, places in imported_names(_parsed(file)):
                if user not in users.setdefault(places, []):
                    users[places].append(user)
    return [Need("import", places, tuple(users[places])) for places in sorted(users)]


def needs_of_methods(root: Path) -> list[Need]:
    """Return one need for each method of an adapter that subclasses a class of SGLang. Whether the
    method overrides one of SGLang shows in the reference release."""
    compat = {
        path.stem: dict(imported_names(_parsed(path)))
        for path in sorted((root / IMPORTERS[0]).glob("*.py"))
    }
    found = []
    for file in sorted((root / ADAPTERS).rglob("*.py")):
        if file.parent != root / IMPORTERS[0]:
            found += _methods_in(file, compat)
    return found


def _methods_in(file: Path, compat: dict[str, dict[str, tuple[str, ...]]]) -> list[Need]:
    tree, found = _parsed(file), []
    known = {
        bound: compat[module][name]
        for bound, module, name in own_names(tree, IMPORTERS[0].replace("/", "."))
        if name in compat.get(module, {})
    }
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        bases = [place for base in owner.bases for place in known.get(ast.unparse(base), ())]
        for node in owner.body if bases else []:
            # A constructor is called by ours; that of the base is among the imports.
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                places = tuple(f"{base}.{node.name}" for base in bases)
                user = f"{file.parent.name}/{file.stem}"
                since, until = METHOD_RELEASES.get(places[0], (SUPPORTED[0], None))
                own = OwnArguments.of(node)
                found.append(Need("method", places, (user,), own, since, until))
    return found


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def digest(needs: Sequence[Need]) -> str:
    """Return a hash of the needs and of the supported releases, which a cached table must match."""
    told = json.dumps([SUPPORTED, [asdict(need) for need in needs]], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()
