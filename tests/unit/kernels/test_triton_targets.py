"""Triton launches fit GPUs that are not here, by the figures of the compiler, and those of Hopper
are the measured ones.

A sample of all launches is compiled, for the GPUs with the least shared memory.
benchmarks/check_triton_targets.py compiles the rest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
from packaging.version import Version

from kvspec_kernels.ops import deterministic_attention, device, int4_products, products
from kvspec_kernels.ops.deterministic_attention import Launch, launch_of
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.runtime.targets.deterministic import DeterministicAttention

OPS = Path(products.__file__).parent
CAPABILITIES = ("8.6", "12.0")
SMALL_BYTES = 101_376
# Bytes a thread that may lie in memory instead of registers. Caches hold them.
MOST_LOCAL = 32
# Launches that need more with Triton 3.7.1 or 3.8.0, and no other.
MORE_LOCAL = {
    "verify int8 of 16, log4, heads of 128": 40,
    "exact in order, pages of 128, heads of 128": 56,
    "encode int8, uniform4, pages of 128, heads of 256": 152,
    "draft of 1, uniform4, heads of 128": 280,
}
IS_NEWER = Version(triton.__version__) >= Version("3.7")
BF16, CPU = torch.bfloat16, torch.device("cpu")


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """Compile in a process of its own: here, kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "kvspec_testkit.kernels.ahead_of_time", "--sample"]
    with ThreadPoolExecutor() as pool:
        done = pool.map(
            lambda capability: subprocess.run(
                [*command, "--capabilities", capability],
                env=environment,
                capture_output=True,
                text=True,
            ),
            CAPABILITIES,
        )
    found = []
    for each in done:
        assert each.returncode == 0, each.stderr
        found += [json.loads(line) for line in each.stdout.splitlines()]
    return found


def test_launches_fit_gpus_of_little_shared_memory(compiled):
    too_large = [each for each in compiled if each["shared_bytes"] > SMALL_BYTES]
    assert not too_large


def test_registers_hold_nearly_everything(compiled):
    allowed = MORE_LOCAL if IS_NEWER else {}
    spilled = [
        each for each in compiled if each["local_bytes"] > allowed.get(each["launch"], MOST_LOCAL)
    ]
    assert not spilled
    assert not [each for each in compiled if each["registers"] * each["num_warps"] * 32 > 65536]


def test_every_kernel_of_the_product_is_in_the_sample(compiled):
    launched = {
        name
        for path in OPS.glob("*.py")
        for name in re.findall(r"(\w+_kernel)\[", path.read_text())
    }
    # Bulk copies are for Hopper and newer data-centre GPUs only. No GPU server packs residuals, and
    # compiling those kernels takes longer than all others.
    expected = launched - {"wide_product_kernel", "pack_kernel", "unpack_kernel"}
    for capability in CAPABILITIES:
        numbers = [int(part) for part in capability.split(".")]
        found = {each["kernel"] for each in compiled if each["capability"] == numbers}
        assert found == expected


def test_deterministic_attention_takes_no_more_than_its_launcher_reckons(compiled):
    """The launcher refuses sizes by this reckoning, so it must not be less than the truth."""
    for page_size, head_dim in ((64, 256), (128, 128)):
        name = f"exact in order, pages of {page_size}, heads of {head_dim}"
        reckoned = deterministic_attention.shared_bytes(page_size, head_dim, BF16, is_large=False)
        for each in compiled:
            if each["launch"] == name and each["kernel"] == "deterministic_attention_kernel":
                launch = Launch(each["num_warps"], each["num_stages"])
                assert 0 <= reckoned[launch] - each["shared_bytes"] <= 64


def absent(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Let launchers believe in a GPU of this capability."""
    monkeypatch.setattr(device, "capability", lambda device: capability)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_launches_of_hopper_are_the_measured_ones(monkeypatch, capability):
    absent(monkeypatch, capability)
    assert launch_of(64, 128, BF16, CPU) == Launch(num_warps=4, num_stages=3)
    tiles = [
        (tile.rows, tile.columns, tile.depth, tile.num_warps, tile.num_stages, tile.bulk)
        for tile in products.tiles_of(CPU).all
    ]
    assert tiles == [
        (64, 32, 256, 4, 4, False),
        (64, 64, 128, 4, 4, False),
        (64, 64, 128, 4, 4, True),
        (64, 128, 64, 4, 5, True),
        (128, 128, 64, 8, 5, True),
        (128, 256, 64, 8, 3, True),
    ]
    chosen = {
        rows: (
            tile.rows,
            tile.columns,
            tile.num_warps,
            tile.num_stages,
            tile.decoded,
            tile.programs,
        )
        for rows, tile in int4_products.chosen_tiles(CPU).items()
    }
    assert chosen == {
        16: (16, 64, 4, 4, False, 2),
        32: (32, 128, 8, 3, True, 1),
        64: (64, 128, 8, 3, True, 1),
    }


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (11, 0), (12, 0)])
def test_other_gpus_have_launches_of_their_own(monkeypatch, capability):
    absent(monkeypatch, capability)
    assert launch_of(64, 128, BF16, CPU) == Launch(num_warps=8, num_stages=3)
    assert launch_of(64, 256, BF16, CPU) == Launch(num_warps=8, num_stages=1)
    assert products.tiles_of(CPU) is products.SMALL
    assert not any(tile.bulk for tile in products.SMALL.all)
    assert int4_products.chosen_tiles(CPU) is int4_products.CHOSEN_SMALL


@pytest.mark.parametrize(
    ("capability", "page_size", "head_dim", "kib"),
    [((8, 6), 128, 256, 99), ((12, 0), 256, 128, 99), ((9, 0), 128, 256, 227)],
)
def test_sizes_beyond_shared_memory_are_refused(monkeypatch, capability, page_size, head_dim, kib):
    absent(monkeypatch, capability)
    with pytest.raises(ValueError, match=f"heads of {head_dim} .* the {kib} KiB of shared memory"):
        launch_of(page_size, head_dim, BF16, CPU)


def test_a_server_refuses_sizes_beyond_shared_memory(make_device_kv):
    kv = make_device_kv(page_size=128, head_dim=256, num_kv_heads=1, num_pages=2)
    with pytest.raises(UnsupportedError, match=r"--kvspec-target exact: pages of 128 .* 227 KiB"):
        DeterministicAttention(kv, 4)
