"""Start-up checks of the flags of prefill and decode servers."""

from __future__ import annotations

from typing import Any

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, TransportError, UnsupportedError
from sglang_kvspec.core.flag_needs import DISAGGREGATION_ROLES

TRANSFER_BACKEND = "kvspec"


def register_choice() -> None:
    """Let SGLang's command line accept KVSpec's backend, once a process."""
    from sglang_kvspec.adapters.compat.server_args import (
        DISAGG_TRANSFER_BACKEND_CHOICES,
        add_disagg_transfer_backend_choices,
    )

    if TRANSFER_BACKEND not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([TRANSFER_BACKEND])


def check_plain_transfer(kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for a server without --kvspec that asks for KVSpec's backend."""
    if kwargs.get("disaggregation_transfer_backend") == TRANSFER_BACKEND:
        raise ConfigError(
            f"--disaggregation-transfer-backend {TRANSFER_BACKEND} needs --kvspec: add --kvspec, "
            "or choose another backend"
        )


def check_transfer_flags(config: KVSpecConfig, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError or UnsupportedError for a prefill or decode server that cannot work."""
    mode = kwargs.get("disaggregation_mode")
    if mode not in DISAGGREGATION_ROLES:
        return
    backend = kwargs.get("disaggregation_transfer_backend")
    if backend != TRANSFER_BACKEND:
        raise ConfigError(
            f"--disaggregation-transfer-backend {backend} cannot be combined with --kvspec "
            f"(allowed: {TRANSFER_BACKEND}): other backends send pages that KVSpec does not keep"
        )
    for name in ("nnodes", "dp_size"):
        if (kwargs.get(name) or 1) > 1:
            raise UnsupportedError(
                f"--{name.replace('_', '-')} {kwargs[name]} cannot be combined with "
                f"--disaggregation-mode {mode} in this version of KVSpec (allowed: 1)"
            )
    _check_link(config, mode)


def _check_link(config: KVSpecConfig, mode: str) -> None:
    """Raise ConfigError for unusable keys or an unusable address. On a prefill server this listens
    at the address for a moment."""
    # Imported late: a plain server loads no transport.
    from sglang_kvspec.transport.keys import check_address, load_keys
    from sglang_kvspec.transport.port import ZmqPort

    folder, host = config.transfer_keys, config.transfer_host
    keys = None if folder is None else load_keys("--kvspec-transfer-keys", folder)
    if keys is not None and mode == "decode" and len(keys.peers) != 1:
        raise ConfigError(
            f"--kvspec-transfer-keys {folder}: peers/*.key must hold one key on a decode server, "
            f"which all prefill servers share, got {len(keys.peers)}"
        )
    address = f"tcp://{host}:0"
    try:
        if mode == "prefill":
            ZmqPort(address, bind=True, keys=keys).close()
        else:
            check_address(address, keys, bind=True)
    except TransportError as error:
        raise ConfigError(
            f"--kvspec-transfer-host {host}: {error} (allowed: an address of this machine; an "
            "address off loopback needs --kvspec-transfer-keys)"
        ) from None
