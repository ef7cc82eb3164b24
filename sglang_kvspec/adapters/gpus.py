"""GPUs of this machine: whether KVSpec runs on them, and what was measured there."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from sglang_kvspec.core.config import Kernels
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.core.units import GIB
from sglang_kvspec.planning.devices import measured_on

LEAST_CAPABILITY = (8, 0)
# First number of the compute capability that the CUDA kernels are for.
HOPPER = 9


class Gpu(NamedTuple):
    """A GPU that this process sees. nbytes: of its memory."""

    name: str
    capability: tuple[int, int]
    nbytes: int

    @property
    def version(self) -> str:
        return ".".join(map(str, self.capability))


def visible_gpus() -> list[Gpu]:
    """Return the GPUs of this process, by their indices. Raises UnsupportedError if there are none
    of NVIDIA."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise UnsupportedError("--kvspec runs on NVIDIA GPUs and on CPUs only")
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        found.append(Gpu(properties.name, capability, properties.total_memory))
    return found


def check_gpus(kernels: Kernels = "auto") -> None:
    """Raise UnsupportedError if there is a GPU on which these kernels do not run. A server may use
    any that is visible."""
    for index, gpu in enumerate(visible_gpus()):
        if gpu.capability < LEAST_CAPABILITY:
            raise UnsupportedError(
                "--kvspec runs on GPUs of compute capability 8.0 and later (Ampere), but GPU "
                f"{index}, {gpu.name}, has {gpu.version}: hide it with CUDA_VISIBLE_DEVICES, or "
                "serve without --kvspec"
            )
        if kernels == "cuda" and gpu.capability[0] != HOPPER:
            raise UnsupportedError(
                "--kvspec-kernels cuda runs on GPUs of compute capability 9.0 (Hopper), but GPU "
                f"{index}, {gpu.name}, has {gpu.version} (allowed: auto, triton)"
            )


def describe_gpus() -> str:
    """Return how many GPUs of which kinds there are, and what was measured there."""
    kinds = Counter(visible_gpus())
    return "; ".join(
        f"{count} x {gpu.name}, {gpu.nbytes / GIB:.0f} GiB each, {kernels_on(gpu)}"
        for gpu, count in kinds.items()
    )


def kernels_on(gpu: Gpu, kernels: Kernels = "auto") -> str:
    """Return the capability of a GPU and, if KVSpec runs there, the kernels that a server takes and
    what was measured of them."""
    if gpu.capability < LEAST_CAPABILITY:
        return f"compute capability {gpu.version}"
    in_cuda = kernels != "triton" and gpu.capability[0] == HOPPER
    name, said = ("cuda", "CUDA") if in_cuda else ("triton", "Triton")
    facts = f"compute capability {gpu.version}, {said} kernels"
    return f"{facts} ({measured_on(gpu.name, name)})"
