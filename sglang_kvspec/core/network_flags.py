"""The --kvspec flags of servers that work together: prefix servers, prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flag import Flag
from sglang_kvspec.core.flag_kinds import Number, Text, choice_of
from sglang_kvspec.core.flag_needs import (
    PREFIX_TIER,
    SPLIT_OVER_SERVERS,
    Need,
    ServerNeed,
    any_of,
    has_exact_target,
    has_uniform_anchors,
    holds_residuals_elsewhere,
)

Transfer = Literal["split", "full", "int8", "int4", "cachegen"]

ExactResidual = Literal["auto", "packed", "raw"]
# Stands for the form that a forecast prefers.
AUTO_RESIDUAL = "auto"

DEFAULT_PUBLISH_GBPS = 0.1
DEFAULT_PREFIX_WAIT_MS = 1000.0
LOOPBACK = "127.0.0.1"


def _unless_auto(is_met: Callable[..., bool]) -> Callable[..., bool]:
    """Return `is_met` for forms of residuals that were asked for: `auto` takes one that fits."""
    return lambda config, *server: config.exact_residual == AUTO_RESIDUAL or is_met(config, *server)


NETWORK_FLAGS: tuple[Flag, ...] = (
    Flag(
        "prefix_server",
        Text("tcp://HOST:PORT", "tcp://host:port"),
        default=None,
        unset="none",
        help="address of a prefix server, `python -m sglang_kvspec.transport.prefix_server`, which "
        "keeps prefixes for several servers of the same model",
        note="the prefix server may start after this server, and may stop and restart",
        server_needs=PREFIX_TIER,
        table="prefix_server",
    ),
    Flag(
        "prefix_server_keys",
        Text("DIR", "a folder"),
        default=None,
        unset="none",
        help="folder with this server's CURVE certificate (`own.key_secret`) and the certificate "
        "of the prefix server only (`peers/*.key`); required for an address off loopback",
        needs=(any_of("prefix_server"),),
        table="prefix_server",
    ),
    Flag(
        "prefix_publish_gbps",
        Number("G", unit="GB/s"),
        default=None,
        unset=DEFAULT_PUBLISH_GBPS,
        help="highest rate (GB: 1e9 bytes) at which all ranks of a server together publish "
        "finished prefixes to the prefix server; 0 turns publishing off",
        needs=(any_of("prefix_server"),),
        table="prefix_server",
    ),
    Flag(
        "prefix_wait_ms",
        Number("MS", unit="ms"),
        default=None,
        unset=DEFAULT_PREFIX_WAIT_MS,
        help="longest time that a queued request waits for pages from the prefix server",
        needs=(any_of("prefix_server"),),
        table="prefix_server",
    ),
    Flag(
        "transfer",
        choice_of(Transfer),
        default="split",
        help="form of the KV that a prefill server sends to a decode server: anchors before "
        "residuals (`split`), or, for comparison, whole pages: in full precision (`full`), or "
        "lossy and decoded without verification (`int8`, `int4`, `cachegen`)",
        needs=(
            Need(
                has_exact_target,
                "{flag} {value} cannot be combined with --kvspec-target {config.target} (allowed: "
                "exact): such a transfer sends KV in the model's dtype, or lossy KV",
                note="all but `split` need `--kvspec-target exact`",
            ),
        ),
        server_needs=(SPLIT_OVER_SERVERS,),
        table="transfer",
    ),
    Flag(
        "exact_residual",
        choice_of(ExactResidual),
        default="raw",
        help="form of the residuals of `exact` in host memory of a GPU server, in prefix tiers, at "
        "prefix servers and in split transfers: all bits (`raw`), only what anchors do not tell "
        "(`packed`), about half as many bytes in bf16, or in host memory the form for which "
        "clearly more tokens/s are expected (`auto`)",
        note="both servers of a transfer, and all servers of a prefix server or folder, need the "
        "same form to share pages, so `auto` is `raw` with any of these, and on a CPU; a GPU takes "
        "`packed` with `--kvspec-prefix-server` with `SGLANG_KVSPEC_UNTESTED=1` only",
        needs=(
            Need(
                _unless_auto(has_exact_target),
                "{flag} {value} cannot be combined with --kvspec-target {config.target} (allowed: "
                "exact)",
                note="`packed` needs `--kvspec-target exact`, `uniform4` anchors of 4 bits and a "
                "KV cache in bf16 or fp16",
            ),
            Need(
                _unless_auto(has_uniform_anchors),
                "{flag} {value} needs --kvspec-codec uniform4 with --kvspec-anchor-bits 4",
            ),
        ),
        server_needs=(
            ServerNeed(
                _unless_auto(holds_residuals_elsewhere),
                "{flag} {value} has no effect without --kvspec-host-gb on a GPU, a prefix tier, or "
                "--kvspec-transfer split with --disaggregation-mode prefill or decode",
                error=ConfigError,
            ),
        ),
        table="transfer",
    ),
    Flag(
        "link_gbps",
        Number("G", unit="GB/s", is_above=True),
        default=None,
        unset="no limit",
        help="highest rate (GB: 1e9 bytes) at which all ranks of a prefill server together send "
        "KV, each with an equal share",
        note="emulates a slower link",
        server_needs=(SPLIT_OVER_SERVERS,),
        table="transfer",
    ),
    Flag(
        "transfer_host",
        Text("HOST", "an address of this machine"),
        default=LOOPBACK,
        help="address from which a prefill server sends KV; an address off loopback requires "
        "`--kvspec-transfer-keys`",
        server_needs=(SPLIT_OVER_SERVERS,),
        table="transfer",
    ),
    Flag(
        "transfer_keys",
        Text("DIR", "a folder"),
        default=None,
        unset="none",
        help="folder with this server's CURVE certificate (`own.key_secret`) and the certificates "
        "of the servers that may be its peers (`peers/*.key`)",
        server_needs=(SPLIT_OVER_SERVERS,),
        table="transfer",
    ),
)
