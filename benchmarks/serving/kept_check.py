"""Part of check_prefix_tiers_gpu.py on kept anchors, which stay in GPU memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from serving.tier_server import TierServer

# Room for more than the anchors of all prompts.
KEPT = "--kvspec-prefix-hbm-fraction=0.02"


class KeptCase(NamedTuple):
    """Server that keeps anchors, and its right answers over cached prefixes. host_gb: GiB of host
    memory, enough for some of the residuals. is_deterministic: the answers are also right without
    cached prefixes, and for all prompts at once."""

    arguments: Sequence[str]
    expected: list[list[int]]
    host_gb: float
    is_deterministic: bool = True
    environment: tuple[tuple[str, str], ...] = ()


def check_kept_anchors(
    check: Any,
    make: Callable[..., TierServer],
    start: Callable[..., None],
    cases: dict[str, KeptCase],
    pool_tokens: int,
    scratch: Path,
) -> None:
    """Check answers of each server over prefixes that have left its KV memory. Their residuals come
    from host memory, as far as it has room, and from disk. make: called as make(name, pool_tokens,
    *arguments, **environment)."""
    servers = {
        name: make(
            name,
            pool_tokens,
            *(*case.arguments, KEPT, f"--kvspec-prefix-host-gb={case.host_gb}"),
            f"--kvspec-prefix-dir={scratch / name}",
            **dict(case.environment),
        )
        for name, case in cases.items()
    }
    with ExitStack() as running:
        start(running, *servers.values())
        for name, case in cases.items():
            server = servers[name]
            cold = check.ask(server, at_once=False)
            server.wait_until_spilled()
            check.same(f"{name}.again", check.ask(server, at_once=False), case.expected)
            # The last prompts are in host memory, the first ones on disk.
            backwards = check.ask(server, at_once=False, backwards=True)
            check.same(f"{name}.backwards", backwards, case.expected)
            note_kept_anchors(check, name, server)
            if case.is_deterministic:
                check.same(f"{name}.cold", cold, case.expected)
                check.same(f"{name}.all_at_once", check.ask(server, at_once=True), case.expected)


def note_kept_anchors(check: Any, name: str, server: TierServer) -> None:
    """Check that residuals came from host memory and from disk for anchors that were in GPU memory,
    and that no anchors came."""
    report = server.report()
    for tier, num_tokens in report["counters"]["kept_anchors"].items():
        check.note(f"{name}.kept_anchors.{tier}", num_tokens, "tokens", None, num_tokens == 0)
    pools, loaded = report["pools"], report["prefix_tiers"]["loaded_bytes"]
    check.note(f"{name}.loaded.anchors", loaded["anchors"], "bytes", 0, loaded["anchors"] > 0)
    num_tokens = loaded["residuals"] / pools["bytes_per_token_residual"]
    all_bytes = loaded["residuals"] + num_tokens * pools["bytes_per_token_anchor"]
    saved = round(1 - sum(loaded.values()) / max(all_bytes, 1), 4)
    check.note(f"{name}.loaded.saved", saved, "of the bytes of whole pages", None, saved <= 0)
