"""Several processes with one store: killed writers, readers that run with a writer, and one
lock."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_kvspec.core.errors import PrefixStoreError
from sglang_kvspec.kv.prefix_store import open_reader, open_store

SCRIPT = Path(__file__).with_name("store_writer.py")


def _load_script():
    spec = importlib.util.spec_from_file_location("store_writer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer_script = _load_script()
IDENTITY = writer_script.IDENTITY


@contextmanager
def writing(folder, *arguments):
    """Run a process that writes to the store, and yield once it has opened the store."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, folder, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def check(reader, number):
    """Return (pages, complete pages) of a prompt. Check that every readable record is right."""
    hit = reader.lookup(writer_script.prompt(number))
    counts = []
    for call, num_bytes in (
        (reader.read_anchors, IDENTITY.anchor_page_bytes),
        (reader.read_residuals, IDENTITY.residual_page_bytes),
    ):
        rows = [memoryview(bytearray(num_bytes)) for _ in hit.pages]
        done = call(hit.pages, rows)
        for page, row, good in zip(hit.pages, rows, done, strict=True):
            assert not good or row == writer_script.record(page.key, num_bytes)
        counts.append(sum(done))
    return tuple(counts)


def test_a_writer_killed_at_any_moment_leaves_what_it_had_written(tmp_path):
    folder = tmp_path / "store"
    chance = random.Random(5)
    for seed in range(4):
        with writing(folder, str(seed)) as process:
            lines = [process.stdout.readline() for _ in range(chance.randint(5, 60))]
            # The writer is already writing the next page, or the one after.
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            lines.extend(process.stdout.readlines())
            done = [line for line in lines if line.startswith("done")][-1]
        last = int(done.split()[1])
        store = open_store(folder, IDENTITY, writer_script.LIMITS, threaded=False)
        assert store.num_pages > 0
        assert check(store, last) == (3, 3)
        for number in range(seed * 1000, last + 3):
            anchors, residuals = check(store, number)
            assert residuals <= anchors
        counters = store.counters
        assert counters.torn + counters.unpaired <= 2
        assert counters.damaged_anchors == counters.damaged_residuals == 0
        store._state.catalogue.check_integrity()
        store.close()


def test_readers_read_no_wrong_bytes_while_a_writer_runs_and_outlive_it(tmp_path):
    folder = tmp_path / "store"
    readers = []
    with writing(folder, "0", "paced") as process:
        for number in range(40):
            process.stdin.write("next\n")
            process.stdin.flush()
            # While the writer writes, reads may miss, but never give wrong bytes. The first reader
            # looks up pages that were evicted long ago.
            for reader in (*readers[:1], *readers[-1:]):
                check(reader, max(0, number - 8))
            while process.stdout.readline() != f"done {number}\n":
                pass
            if number % 3 == 0:
                readers.append(open_reader(folder, IDENTITY))
                assert check(readers[-1], number) == (3, 3)
        assert check(readers[0], 0) == (0, 0)
        assert readers[0].counters.stale > 0
    assert check(readers[-1], 39) == (3, 3)
    for reader in readers:
        counters = reader.counters
        assert counters.damaged_anchors == counters.damaged_residuals == 0
        assert counters.read_errors == 0
        reader.close()


def test_only_one_process_writes(tmp_path):
    folder = tmp_path / "store"
    with writing(folder, "0") as process:
        with pytest.raises(PrefixStoreError, match=f"being written by process {process.pid}; "):
            open_store(folder, IDENTITY, writer_script.LIMITS)
        process.kill()
        process.wait()
        store = open_store(folder, IDENTITY, writer_script.LIMITS, threaded=False)
        with pytest.raises(PrefixStoreError, match=f"being written by process {os.getpid()}; "):
            open_store(folder, IDENTITY, writer_script.LIMITS)
        store.close()
