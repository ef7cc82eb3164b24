"""Start-up checks of the flags of the prefix cache's tiers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from sglang_kvspec.transport.keys import CurveKeys

PREFIX_CACHE = "kvspec"


def check_plain_prefix_cache(kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for a server without --kvspec that asks for KVSpec's prefix cache."""
    if kwargs.get("radix_cache_backend") == PREFIX_CACHE:
        raise ConfigError(
            f"--radix-cache-backend {PREFIX_CACHE} needs --kvspec: add --kvspec, or leave "
            "--radix-cache-backend unset"
        )


def check_prefix_tiers(config: KVSpecConfig) -> None:
    """Raise ConfigError for a folder or an address that the prefix cache's tiers cannot use."""
    if config.prefix_dir is not None:
        _check_folder("--kvspec-prefix-dir", Path(config.prefix_dir))
    if config.prefix_server is not None:
        _check_server(config, config.prefix_server)


def _check_server(config: KVSpecConfig, address: str) -> None:
    """Raise ConfigError for an unusable address or keys. The server need not answer yet."""
    # Imported late: a plain server loads no transport.
    from sglang_kvspec.transport.keys import check_address

    keys = prefix_server_keys(config)
    try:
        check_address(address, keys, bind=False)
        has_port = urlsplit(address).port
    except (TransportError, ValueError) as error:
        raise ConfigError(f"--kvspec-prefix-server {address}: {error}") from None
    if not has_port:
        raise ConfigError(f"--kvspec-prefix-server must be tcp://host:port, got {address!r}")


def prefix_server_keys(config: KVSpecConfig) -> CurveKeys | None:
    """Return the keys for the prefix server; None without --kvspec-prefix-server-keys.

    Raises ConfigError for a folder without keys, or with more or fewer peers than one.
    """
    from sglang_kvspec.transport.keys import load_keys

    folder = config.prefix_server_keys
    if folder is None:
        return None
    keys = load_keys("--kvspec-prefix-server-keys", folder)
    if len(keys.peers) != 1:
        raise ConfigError(
            f"--kvspec-prefix-server-keys {folder}: peers/*.key must hold one key, that of the "
            f"prefix server, got {len(keys.peers)}"
        )
    return keys


def _check_folder(flag: str, folder: Path) -> None:
    """Make the folder if there is none, before any weight is read. Raises ConfigError if it cannot
    be made or used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: {error.strerror} (allowed: a folder)") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {folder}: Permission denied (allowed: a writable folder)")
