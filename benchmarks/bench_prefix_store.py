"""Measure how fast the prefix store writes, reads and finds pages, and the cost of checksums.

    python benchmarks/bench_prefix_store.py [--folder DIR] [--gib N] [--pages N] [--out PATH]

Records of the Llama-3.1-8B shape (32 layers, 8 KV heads of 128, bf16, pages of 64 tokens) are
written and read back: from the disk, after they were dropped from the page cache, and from the page
cache. Lookups and opening are timed on a store of many pages with small records. Every byte is read
once and compared with what was written before reads are timed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from acceptance.report import Figure, write_json
from rich.console import Console
from rich.table import Table
from xxhash import xxh3_64_intdigest

from sglang_kvspec.codecs import make_codec
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.prefix_store import (
    PrefixStore,
    StoredPage,
    StoreIdentity,
    StoreLimits,
    chain_links,
    open_store,
    page_rows,
)

OUT = Path(__file__).resolve().parent / "results" / "prefix_store.json"
ROUNDS = 5
PAGE_SIZE = 64
CHAIN_PAGES = 512
BATCH_PAGES = 16
console = Console(width=100)


def eight_b(page_size: int) -> StoreIdentity:
    sizes = {"page_size": page_size, "head_dim": 128}
    codec = make_codec("log4", target="int8", dtype=torch.bfloat16, **sizes)
    geometry = KVGeometry(32, 8, 128, page_size, torch.bfloat16)
    return StoreIdentity.of(codec, geometry, model="bench")


def spread(name: str, samples: Sequence[float], unit: str) -> Figure:
    """Return the median, with half the range as spread."""
    return Figure(name, median(samples), unit, (max(samples) - min(samples)) / 2)


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.data"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure_transfers(folder: Path, gib: float) -> list[Figure]:
    """Measure MB/s of writing, with and without a flush, and of reading anchors and residuals in
    batches of neighbouring pages."""
    identity = eight_b(PAGE_SIZE)
    anchor_bytes, residual_bytes = identity.anchor_page_bytes, identity.residual_page_bytes
    num_pages = max(BATCH_PAGES, int(gib * 2**30 / (anchor_bytes + residual_bytes)))
    limits = StoreLimits(disk_bytes=int(1.1 * num_pages * (anchor_bytes + residual_bytes)))
    anchors = torch.randint(0, 256, (BATCH_PAGES, anchor_bytes), dtype=torch.uint8)
    residuals = torch.randint(0, 256, (BATCH_PAGES, residual_bytes), dtype=torch.uint8)
    tokens = list(range(num_pages * PAGE_SIZE))
    links = list(chain_links(tokens, PAGE_SIZE))
    rates: dict[str, list[float]] = {}
    put_us: list[float] = []

    def note(name: str, num_bytes: int, seconds: float) -> None:
        rates.setdefault(name, []).append(num_bytes / seconds / 1e6)

    for _ in range(ROUNDS):
        shutil.rmtree(folder, ignore_errors=True)
        store = open_store(folder, identity, limits, threaded=False)
        sources = list(zip(page_rows(anchors), page_rows(residuals), strict=True))
        start = perf_counter()
        for number, link in enumerate(links):
            before = perf_counter()
            assert store.put(link, *sources[number % BATCH_PAGES])
            put_us.append((perf_counter() - before) * 1e6)
            store.write_due()
        note(
            "write.page_cache", num_pages * (anchor_bytes + residual_bytes), perf_counter() - start
        )
        assert store.flush(0)
        note("write.disk", num_pages * (anchor_bytes + residual_bytes), perf_counter() - start)
        pages = store.lookup(tokens).pages
        assert len(pages) == num_pages
        for tier, call, source in (
            ("anchors", store.read_anchors, anchors),
            ("residuals", store.read_residuals, residuals),
        ):
            out = torch.zeros_like(source)
            read_all(call, pages, out, source)
            drop_from_page_cache(folder)
            for place in ("disk", "page_cache"):
                seconds = read_all(call, pages, out, None)
                note(f"read.{tier}.{place}", num_pages * source[0].nbytes, seconds)
        store.close()
    put_us.sort()
    return [
        *(spread(f"{name}.mb_per_s", samples, "MB/s") for name, samples in rates.items()),
        Figure("put.caller.us", median(put_us), "us"),
        Figure("put.caller.p99_us", put_us[int(0.99 * len(put_us))], "us"),
    ]


def read_all(
    call: Callable[[Sequence[StoredPage], Sequence[memoryview]], list[bool]],
    pages: Sequence[StoredPage],
    out: torch.Tensor,
    expected: torch.Tensor | None,
) -> float:
    rows = page_rows(out)
    start = perf_counter()
    for first in range(0, len(pages), BATCH_PAGES):
        batch = pages[first : first + BATCH_PAGES]
        assert all(call(batch, rows[: len(batch)]))
        if expected is not None:
            assert torch.equal(out[: len(batch)], expected[: len(batch)])
    return perf_counter() - start


def measure_lookups(folder: Path, num_pages: int) -> list[Figure]:
    """Time lookups and opening of a store with many pages. Records are small: only the number of
    pages matters."""
    identity = StoreIdentity(
        "bench", "0/1", "log4", "{}", "int8", "bfloat16", PAGE_SIZE, 1, 1, 16, 64, 64
    )
    limits = StoreLimits(disk_bytes=2000 * num_pages)
    store = open_store(folder, identity, limits, threaded=False)
    prompts = [
        [number] * PAGE_SIZE + list(range((CHAIN_PAGES - 1) * PAGE_SIZE))
        for number in range(-(-num_pages // CHAIN_PAGES))
    ]
    start = perf_counter()
    for prompt in prompts:
        for link in chain_links(prompt, PAGE_SIZE):
            assert store.put(link, bytes(64), bytes(64))
        store.write_due()
    put_us = (perf_counter() - start) / store.num_pages * 1e6
    assert store.num_pages >= num_pages
    store.close()
    opening = []
    for _ in range(ROUNDS):
        start = perf_counter()
        store = open_store(folder, identity, limits, threaded=False)
        opening.append(perf_counter() - start)
        if len(opening) < ROUNDS:
            store.close()
    figures = [
        Figure("store.pages", store.num_pages, "pages"),
        Figure("put.small_page.us", put_us, "us"),
        spread("open.s", opening, "s"),
        *lookup_times(store, prompts),
    ]
    store.close()
    return figures


def lookup_times(store: PrefixStore, prompts: Sequence[list[int]]) -> list[Figure]:
    """Look up every prompt once, with all pages, 16 pages or no page in the store. Return median
    and 99th percentile in microseconds."""
    figures = []
    for num_found in (CHAIN_PAGES, 16, 0):
        samples = []
        for prompt in prompts:
            asked = prompt[: num_found * PAGE_SIZE] + [-1] * PAGE_SIZE
            start = perf_counter()
            hit = store.lookup(asked)
            samples.append((perf_counter() - start) * 1e6)
            assert hit.num_complete == len(hit.pages) == num_found
        samples.sort()
        name = f"lookup.{num_found}_pages"
        figures.append(Figure(f"{name}.us", median(samples), "us"))
        figures.append(Figure(f"{name}.p99_us", samples[int(0.99 * len(samples))], "us"))
    return figures


def measure_checksums() -> list[Figure]:
    """Compare the speed of the checksum in use with zlib's, on an anchor page."""
    content = os.urandom(eight_b(PAGE_SIZE).anchor_page_bytes)
    figures = []
    for name, function in (("xxh3_64", xxh3_64_intdigest), ("crc32", zlib.crc32)):
        rates = []
        for _ in range(ROUNDS):
            start = perf_counter()
            for _ in range(20):
                function(content)
            rates.append(20 * len(content) / (perf_counter() - start) / 1e6)
        figures.append(spread(f"checksum.{name}.mb_per_s", rates, "MB/s"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--folder",
        type=Path,
        help="existing folder on the disk to measure (default: the system's temporary folder)",
    )
    parser.add_argument(
        "--gib", type=float, default=1.0, help="GiB to write and to read in each round"
    )
    parser.add_argument(
        "--pages", type=int, default=100_000, help="pages in the store that serves lookups"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    load_before, *_ = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        figures = [
            *measure_transfers(Path(folder) / "large", arguments.gib),
            *measure_lookups(Path(folder) / "many", arguments.pages),
            *measure_checksums(),
        ]
    table = Table("figure", "median", "+-", "unit")
    for figure in figures:
        around = "" if figure.spread is None else f"{figure.spread:,.1f}"
        table.add_row(figure.name, f"{figure.value:,.1f}", around, figure.unit)
    console.print(table)
    identity = eight_b(PAGE_SIZE)
    settings = {
        "rounds": ROUNDS,
        "gib": arguments.gib,
        "cores": os.cpu_count(),
        "load_of_others": round(load_before, 1),
        "batch_pages": BATCH_PAGES,
        "anchor_page_bytes": identity.anchor_page_bytes,
        "residual_page_bytes": identity.residual_page_bytes,
        "spread": "half the range over the rounds",
        "disk": "data files are dropped from the page cache before a read; writes are flushed",
    }
    write_json(arguments.out, "bench_prefix_store", torch.device("cpu"), settings, figures)


if __name__ == "__main__":
    main()
