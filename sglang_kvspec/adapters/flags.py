"""The command-line face of KVSpecConfig."""

from __future__ import annotations

import argparse
from contextvars import ContextVar
from typing import Any

from sglang_kvspec.core.config import (
    AUTO_DRAFT_LEN,
    DEFAULT_PREFIX_GB,
    DEFAULT_PREFIX_WAIT_MS,
    DEFAULT_PUBLISH_GBPS,
    MAX_DRAFT_LEN,
    KVSpecConfig,
)
from sglang_kvspec.core.errors import ConfigError

PREFIX = "kvspec_"

# ServerArgs is built inside from_cli_args, which passes declared fields only.
pending_flags: ContextVar[dict[str, Any] | None] = ContextVar("kvspec_pending_flags", default=None)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the kvspec group. Values are checked by KVSpecConfig, whose messages name the flag, so
    choices are shown here but not enforced."""
    default = KVSpecConfig()
    group = parser.add_argument_group(
        "kvspec", "serve on a 4-bit KV cache and return exactly what full precision returns"
    )
    group.add_argument(
        "--kvspec", nargs="?", const=True, metavar="true|false", help="turn KVSpec on"
    )
    group.add_argument(
        "--kvspec-target",
        metavar="{exact,int8}",
        help="what output is verified against: the model's own KV dtype, or 8-bit KV "
        f"(default: {default.target})",
    )
    group.add_argument(
        "--kvspec-codec",
        metavar="{uniform4,log4}",
        help=f"how pages are split into anchor and residual (default: {default.codec})",
    )
    group.add_argument(
        "--kvspec-draft-len",
        metavar="N|auto",
        help="tokens drafted before a verification; 0 turns drafting off; at most "
        f"{MAX_DRAFT_LEN} (default: {default.draft_len})",
    )
    group.add_argument(
        "--kvspec-recent-pages",
        metavar="N",
        help="full pages of the newest tokens kept in full precision "
        f"(default: {default.recent_pages})",
    )
    group.add_argument(
        "--kvspec-host-gb",
        metavar="GB",
        help="GiB of host memory for residuals, of all ranks on a machine; 0 keeps them in the KV "
        "memory (default: enough for every page; on a GPU 0)",
    )
    group.add_argument(
        "--kvspec-residual-hbm-fraction",
        metavar="F",
        help="share of the KV memory that caches residuals, 0 to 0.9 "
        f"(default: {default.residual_hbm_fraction})",
    )
    group.add_argument(
        "--kvspec-schedule",
        metavar="{auto,staggered,rounds}",
        help="verifications take turns (staggered), or all requests draft, then all verify "
        "(rounds); auto: staggered on a CPU, rounds on a GPU (default: auto)",
    )
    group.add_argument(
        "--kvspec-stream",
        metavar="{paced,burst}",
        help="tokens of a round reach a stream one by one over the time of the next round (paced), "
        f"or all at once (burst) (default: {default.stream})",
    )
    group.add_argument(
        "--kvspec-prefix-host-gb",
        metavar="GB",
        help="GiB of host memory for cached prefixes that the KV memory has no more room for, of "
        f"all ranks on a machine together (default: {default.prefix_host_gb:g})",
    )
    group.add_argument(
        "--kvspec-prefix-hbm-fraction",
        metavar="F",
        help="share of the KV memory that keeps anchors of such prefixes, so that only residuals "
        f"come back from host memory or disk, 0 to 0.9 (default: {default.prefix_hbm_fraction:g})",
    )
    group.add_argument(
        "--kvspec-prefix-dir",
        metavar="DIR",
        help="folder that keeps cached prefixes over restarts of the same model (default: none)",
    )
    group.add_argument(
        "--kvspec-prefix-gb",
        metavar="GB",
        help="GiB that a model's prefixes may take in --kvspec-prefix-dir, of all ranks on a "
        f"machine together (default: {DEFAULT_PREFIX_GB:g})",
    )
    _add_prefix_server_flags(group)
    _add_transfer_flags(group)


def _add_prefix_server_flags(group: argparse._ArgumentGroup) -> None:
    """What matters where several servers share prefixes."""
    group.add_argument(
        "--kvspec-prefix-server",
        metavar="tcp://HOST:PORT",
        help="where `python -m sglang_kvspec.transport.prefix_server` keeps prefixes of several "
        "servers of the same model (default: none)",
    )
    group.add_argument(
        "--kvspec-prefix-server-keys",
        metavar="DIR",
        help="folder with this server's CURVE certificate, own.key_secret, and the prefix "
        "server's, peers/*.key; needed off loopback (default: none)",
    )
    group.add_argument(
        "--kvspec-prefix-publish-gbps",
        metavar="G",
        help="GB/s (1e9 bytes) of its finished prefixes that a server sends there at most; 0 for "
        f"none (default: {DEFAULT_PUBLISH_GBPS:g})",
    )
    group.add_argument(
        "--kvspec-prefix-wait-ms",
        metavar="MS",
        help="how long a request waits for pages from there at most "
        f"(default: {DEFAULT_PREFIX_WAIT_MS:g})",
    )


def _add_transfer_flags(group: argparse._ArgumentGroup) -> None:
    """What matters to a prefill and a decode server only."""
    default = KVSpecConfig()
    group.add_argument(
        "--kvspec-transfer",
        metavar="{split,full,int8,int4,cachegen}",
        help="how KV goes from a prefill to a decode server: anchors before residuals, or, to "
        "compare with, all of it at once: in full, or lossy, which is decoded without verification "
        f"(default: {default.transfer})",
    )
    group.add_argument(
        "--kvspec-link-gbps",
        metavar="G",
        help="GB/s (1e9 bytes) that a prefill server sends at most (default: no limit)",
    )
    group.add_argument(
        "--kvspec-transfer-host",
        metavar="HOST",
        help="address that a prefill server sends KV from; off loopback --kvspec-transfer-keys is "
        f"needed (default: {default.transfer_host})",
    )
    group.add_argument(
        "--kvspec-transfer-keys",
        metavar="DIR",
        help="folder with this server's CURVE certificate, own.key_secret, and those of "
        "the servers it may talk to, peers/*.key (default: none)",
    )


def flag_values(args: argparse.Namespace) -> dict[str, Any]:
    """The kvspec flags of a parsed command line, unset ones left out."""
    values = {
        name: value
        for name, value in vars(args).items()
        if name == "kvspec" or name.startswith(PREFIX)
    }
    return {name: value for name, value in values.items() if value not in (None, False)}


def parse_config(values: dict[str, Any]) -> KVSpecConfig | None:
    """Build the configuration from `kvspec` and `kvspec_*` values; None when kvspec is off.

    Strings are converted, as flags and YAML files give them. Raises ConfigError.
    """
    values = dict(values)
    on = _switch(values.pop("kvspec", False))
    options = {name.removeprefix(PREFIX): value for name, value in values.items()}
    options = {name: value for name, value in options.items() if value is not None}
    if not on:
        if options:
            flag = "--kvspec-" + next(iter(options)).replace("_", "-")
            raise ConfigError(f"{flag} has no effect without --kvspec")
        return None
    return KVSpecConfig.from_dict({name: _convert(name, v) for name, v in options.items()})


def _switch(value: Any) -> bool:
    # A quoted word in a YAML file comes as a string.
    words = {"true": True, "false": False}
    on = words.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(on, bool):
        raise ConfigError(
            f"--kvspec must stand alone or with true or false, got {value!r}: write --kvspec, or "
            "`kvspec: true` in a --config file"
        )
    return on


_NUMBERS: dict[str, type[int] | type[float]] = {
    "draft_len": int,
    "recent_pages": int,
    "host_gb": float,
    "residual_hbm_fraction": float,
    "prefix_host_gb": float,
    "prefix_hbm_fraction": float,
    "prefix_gb": float,
    "prefix_publish_gbps": float,
    "prefix_wait_ms": float,
    "link_gbps": float,
}


def _convert(name: str, value: Any) -> Any:
    kind = _NUMBERS.get(name)
    if kind is None or value == AUTO_DRAFT_LEN or isinstance(value, bool):
        return value
    try:
        return kind(value)
    except (TypeError, ValueError):
        flag = "--kvspec-" + name.replace("_", "-")
        allowed = "an integer" if kind is int else "a number"
        if name == "draft_len":
            allowed = f"'auto' or an integer from 0 to {MAX_DRAFT_LEN}"
        raise ConfigError(f"{flag} must be {allowed}, got {value!r}") from None
