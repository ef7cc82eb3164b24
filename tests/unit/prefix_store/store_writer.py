"""Process that writes prompt after prompt to a prefix store and reports it, for tests that kill it.

    python store_writer.py FOLDER SEED [paced]

Prints "open". Then for each prompt it prints "begin" before each page is written, and "done N"
after all pages. With `paced` it waits for a line before each prompt. Records are made from their
page's key.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from sglang_kvspec.kv.prefix_store import StoreIdentity, StoreLimits, chain_links, open_store

IDENTITY = StoreIdentity(
    model="killed",
    shard="0/1",
    codec="uniform4",
    settings="{}",
    target="exact",
    dtype="float32",
    page_size=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=16,
    # Large records, so that many kills happen within one.
    anchor_page_bytes=100_000,
    residual_page_bytes=300_000,
)
LIMITS = StoreLimits(disk_bytes=10_000_000)


def prompt(number: int) -> list[int]:
    """Return three pages, of which the first is shared by five successive prompts."""
    return [number // 5] * 4 + [number] * 8


def record(key: bytes, num_bytes: int) -> bytes:
    return random.Random(key + num_bytes.to_bytes(4, "little")).randbytes(num_bytes)


def main() -> None:
    store = open_store(Path(sys.argv[1]), IDENTITY, LIMITS, threaded=False)
    first = int(sys.argv[2]) * 1000
    print("open", flush=True)
    for number in range(first, first + 1000):
        if sys.argv[3:] == ["paced"] and not sys.stdin.readline():
            return
        for link in chain_links(prompt(number), IDENTITY.page_size):
            anchor = record(link.key, IDENTITY.anchor_page_bytes)
            residual = record(link.key, IDENTITY.residual_page_bytes)
            assert store.put(link, anchor, residual)
            print("begin", flush=True)
            store.write_due()
        print(f"done {number}", flush=True)


if __name__ == "__main__":
    main()
