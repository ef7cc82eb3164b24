"""Stores of a server's ranks in its --kvspec-prefix-dir, inspected and damaged from outside."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_kvspec.kv.prefix_store import StoreIdentity, open_reader


def stores_in(folder: Path) -> list[tuple[Path, StoreIdentity]]:
    """Return folder and identity of each rank's store, by rank."""
    found = [
        (path.parent, StoreIdentity(**json.loads(path.read_text())))
        for path in folder.rglob("identity.json")
    ]
    return sorted(found, key=lambda store: store[1].shard)


def pages_on_disk(folder: Path) -> list[int]:
    """Return the number of pages on disk with both parts, by rank."""
    counts = []
    for path, identity in stores_in(folder):
        reader = open_reader(path, identity)
        counts.append(min(reader.num_pages, reader.num_residuals))
        reader.close()
    return counts


def spoil(folder: Path, name: str, record: int, rank: int = 0) -> int:
    """Flip a bit of a record in a rank's file of this name. Return the record's number of bytes."""
    path, identity = stores_in(folder)[rank]
    num_bytes = {
        "anchors.data": identity.anchor_page_bytes,
        "residuals.data": identity.residual_page_bytes,
    }[name]
    with (path / name).open("r+b") as file:
        file.seek(record * num_bytes + num_bytes // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    return num_bytes
