"""Identity of a prefix store: the model and the settings that its records were made for."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvspec_kernels.format_version import FORMAT_VERSION
from sglang_kvspec.core.errors import PrefixStoreError

if TYPE_CHECKING:
    # These modules import torch, but a prefix server starts without it.
    from sglang_kvspec.codecs.base import Codec
    from sglang_kvspec.kv.geometry import KVGeometry

# Raised by one whenever the files of a store change meaning.
STORE_VERSION = 2
IDENTITY_FILE = "identity.json"


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Model and settings of a store. model: a fingerprint of the weights, not a path. shard: the
    part of the model's KV heads and layers, "rank/size" under tensor parallelism. residual: form of
    residuals."""

    model: str
    shard: str
    codec: str
    settings: str
    target: str
    dtype: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    anchor_page_bytes: int
    residual_page_bytes: int
    record_version: int = FORMAT_VERSION
    store_version: int = STORE_VERSION
    residual: str = "raw"

    @classmethod
    def of(
        cls, codec: Codec, geometry: KVGeometry, *, model: str, shard: str = "0/1"
    ) -> StoreIdentity:
        # Late import: a prefix server starts without torch.
        from sglang_kvspec.kv.residual_forms import residual_form

        form = residual_form(codec, geometry)
        records = geometry.num_layers * geometry.num_kv_heads
        return cls(
            model=model,
            shard=shard,
            codec=codec.name,
            settings=json.dumps(asdict(codec.settings), sort_keys=True),
            target=codec.target,
            dtype=str(codec.dtype).removeprefix("torch."),
            page_size=codec.page_size,
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=codec.head_dim,
            anchor_page_bytes=records * codec.anchor_bytes,
            residual_page_bytes=form.slot_bytes,
            residual=form.name,
        )

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()

    @property
    def folder_name(self) -> str:
        """Name of the store's folder, where several stores lie side by side."""
        name = f"{self.codec}-{self.target}-{self.digest.hex()[:16]}"
        rank, size = self.shard.split("/")
        return name if size == "1" else f"{name}-rank{rank}of{size}"


def write_identity(directory: Path, identity: StoreIdentity) -> None:
    """Write the identity to `directory`. A crash leaves all of it or none."""
    draft = directory / f"{IDENTITY_FILE}.tmp"
    with draft.open("w", encoding="utf-8") as file:
        json.dump(asdict(identity), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(directory / IDENTITY_FILE)


def check_identity(directory: Path, identity: StoreIdentity) -> bool:
    """Return True if `directory` has this identity, False if it has none. Raises PrefixStoreError
    if it has another one, or if its identity cannot be read."""
    path = directory / IDENTITY_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise PrefixStoreError(f"prefix store {directory}: cannot read {path.name}: {error}") from (
            error
        )
    reason = _difference(found, identity)
    if reason is not None:
        raise PrefixStoreError(
            f"prefix store {directory} does not fit this server: {reason}; choose another folder"
        )
    return True


def _difference(found: Any, identity: StoreIdentity) -> str | None:
    wanted = asdict(identity)
    if not isinstance(found, dict):
        return f"{IDENTITY_FILE} is not a JSON object"
    # In the order of the fields, so that the most telling difference is named.
    for name in (field.name for field in fields(StoreIdentity)):
        if found.get(name) != wanted[name]:
            return f"the store has {name} {found.get(name)!r}, this server {wanted[name]!r}"
    extra = sorted(set(found) - set(wanted))
    return f"{IDENTITY_FILE} has the unknown field {extra[0]!r}" if extra else None
