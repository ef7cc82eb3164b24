"""Compiles the project's Triton launches for GPUs that are not here, and reads the compiler's
figures.

Launchers run with small tensors on the CPU, so signatures, alignments and constants are those of
serving. Needs neither a GPU nor its driver. Must run in a process without TRITON_INTERPRET: Triton
reads the variable when a kernel is defined.

    python -m kvspec_testkit.kernels.ahead_of_time --capabilities 8.6 12.0 --sample
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvspec_kernels.ops import device as device_facts

Capability = tuple[int, int]

# Most dynamic shared memory of a block, in bytes: NVIDIA's figures by compute capability (CUDA C++
# programming guide, table of technical specifications).
SHARED_LIMITS: Mapping[Capability, int] = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}
# Registers of a multiprocessor, on all of them.
REGISTERS = 65536
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# cuobjdump's summary of a kernel. STACK has the bytes a thread that did not fit registers.
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) ")


@dataclass(frozen=True, slots=True)
class Compiled:
    """Figures of a compiled kernel. shared_bytes: of a block, dynamic. local_bytes: of a thread, in
    memory because registers did not suffice."""

    launch: str
    kernel: str
    capability: Capability
    shared_bytes: int
    registers: int
    local_bytes: int
    num_warps: int
    num_stages: int

    @property
    def fits(self) -> bool:
        """Return True if a GPU of this capability can launch the kernel."""
        registers = self.registers * self.num_warps * 32
        return self.shared_bytes <= SHARED_LIMITS[self.capability] and registers <= REGISTERS


class _AbsentGpu:
    """Triton driver of a GPU that is not here. Answers what a compilation asks."""

    def __init__(self, capability: Capability) -> None:
        self._number = capability[0] * 10 + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._number, 32)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device.
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(launch: str, capability: Capability) -> Iterator[list[Compiled]]:
    """Compile what launchers launch in this context, without running it. The yielded list gets the
    figures of each kernel. Raises the compiler's errors. Triton keeps the driver of an absent GPU:
    the process must launch nothing afterwards."""
    found: list[Compiled] = []
    launched = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launched(kernel, *args, grid=grid, warmup=True, **options)
        found.append(_figures(launch, kernel.fn.__name__, capability, compiled))
        return compiled

    driver.set_active(_AbsentGpu(capability))
    believed = patch.object(device_facts, "capability", lambda device: capability)
    with believed, patch.object(JITFunction, "run", run):
        yield found


def _figures(launch: str, kernel: str, capability: Capability, compiled: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = USAGE.search(said)
    assert usage is not None, said
    metadata = compiled.metadata
    figures = (metadata.shared, int(usage[1]), int(usage[2]))
    return Compiled(launch, kernel, capability, *figures, metadata.num_warps, metadata.num_stages)


def compile_all(
    launches: Mapping[str, Callable[[], None]], capabilities: list[Capability]
) -> Iterator[Compiled]:
    """Yield the figures of every kernel of the launches, by capability."""
    for capability in capabilities:
        for name, launch in launches.items():
            with compiling(name, capability) as found:
                launch()
            # Layers launch a kernel again.
            yield from dict.fromkeys(found)


def main() -> None:
    # Imported late: these modules make tensors and read declarations of codecs.
    from kvspec_testkit.kernels.launches import LAUNCHES, SAMPLE

    parser = argparse.ArgumentParser(description=__doc__)
    names = [".".join(map(str, capability)) for capability in SHARED_LIMITS]
    parser.add_argument("--capabilities", nargs="+", choices=names, default=names)
    parser.add_argument("--sample", action="store_true", help="a few launches of each kernel")
    parser.add_argument("--launch", help="launches whose name contains this", default="")
    args = parser.parse_args()
    by_name = dict(zip(names, SHARED_LIMITS, strict=True))
    capabilities = [by_name[name] for name in args.capabilities]
    launches = {
        name: launch
        for name, launch in LAUNCHES.items()
        if args.launch in name and (name in SAMPLE or not args.sample)
    }
    for compiled in compile_all(launches, capabilities):
        print(json.dumps(asdict(compiled)), flush=True)


if __name__ == "__main__":
    main()
