"""Prefix stores on disk, one for each model and setting, opened for its first server."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from kvspec_kernels.format_version import FORMAT_VERSION
from sglang_kvspec.core.errors import ConfigError, PrefixStoreError
from sglang_kvspec.kv.prefix_store import PrefixStore, StoreIdentity, StoreLimits, open_store
from sglang_kvspec.kv.prefix_store.identity import IDENTITY_FILE, STORE_VERSION
from sglang_kvspec.kv.prefix_store.writer_lock import WriterLock
from sglang_kvspec.transport.prefixes.frames import MAX_PAGE_BYTES, StoreLayout

# Bytes of published pages that are not on disk yet, for each model and setting.
QUEUE_BYTES = 256 << 20


class Shelves:
    def __init__(self, directory: Path, disk_bytes: int, max_models: int) -> None:
        """disk_bytes: limit for each model and setting. max_models: limit of models and settings.
        Raises PrefixStoreError if the folder is another process's, or cannot be written."""
        self._directory, self._disk_bytes, self._max_models = directory, disk_bytes, max_models
        self._stores: dict[StoreIdentity, PrefixStore] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(directory)
        except OSError as error:
            raise PrefixStoreError(f"cannot write to the folder: {error}") from error

    def open(self, layout: StoreLayout) -> PrefixStore:
        """Return the store of a layout. Raises PrefixStoreError, whose message the server is told,
        if there can be none."""
        values = {field.name: getattr(layout, field.name) for field in fields(StoreIdentity)}
        identity = StoreIdentity(**values)
        if identity in self._stores:
            return self._stores[identity]
        self._check(identity)
        page_bytes = identity.anchor_page_bytes + identity.residual_page_bytes
        try:
            limits = StoreLimits(self._disk_bytes, queue_bytes=max(QUEUE_BYTES, page_bytes))
            store = open_store(self._directory / identity.folder_name, identity, limits)
        except ConfigError as error:
            raise PrefixStoreError(f"--gb of the prefix server is too small: {error}") from error
        self._stores[identity] = store
        return store

    def close(self, timeout_s: float) -> None:
        """Flush and close all stores. Each of the two takes timeout_s at most, over all stores."""
        for store in self._stores.values():
            store.flush(timeout_s / len(self._stores))
            store.close(timeout_s / len(self._stores))
        self._stores.clear()
        self._lock.release()

    def stores(self) -> list[PrefixStore]:
        """Return the open stores."""
        return list(self._stores.values())

    def report(self) -> list[str]:
        """Return a line for each open store."""
        return [
            f"{identity.folder_name}: {store.num_pages} pages, {store.num_residuals} residuals"
            for identity, store in self._stores.items()
        ]

    def _check(self, identity: StoreIdentity) -> None:
        for name, ours, theirs in (
            ("record version", FORMAT_VERSION, identity.record_version),
            ("store version", STORE_VERSION, identity.store_version),
        ):
            if ours != theirs:
                raise PrefixStoreError(f"the prefix server has {name} {ours}, the server {theirs}")
        if identity.anchor_page_bytes + identity.residual_page_bytes > MAX_PAGE_BYTES:
            raise PrefixStoreError(
                f"a page has {identity.anchor_page_bytes + identity.residual_page_bytes} bytes, "
                f"the prefix server takes at most {MAX_PAGE_BYTES}"
            )
        paths = self._directory.glob(f"*/{IDENTITY_FILE}")
        known = {path.parent.name for path in paths if _is_of_this_version(path)}
        if len(known - {identity.folder_name}) >= self._max_models:
            raise PrefixStoreError(
                f"the prefix server already keeps {len(known)} models and settings, at most "
                f"{self._max_models}: raise --models of the prefix server"
            )


def _is_of_this_version(path: Path) -> bool:
    """Return False for the identity of a store that no server can use any more."""
    try:
        return bool(json.loads(path.read_text("utf-8"))["store_version"] == STORE_VERSION)
    except (OSError, ValueError, KeyError, TypeError):
        return True
