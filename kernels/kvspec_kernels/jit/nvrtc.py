"""CUDA C++ kernels compiled at run time: NVRTC and the driver through cuda-bindings. PyTorch for
CUDA brings both, so that no compiler has to be installed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

SOURCES = Path(__file__).parent / "cuda"


class CudaError(RuntimeError):
    """Failure of NVRTC or of the driver. The message has its log or error name."""


class Compiled(NamedTuple):
    """Machine code, and the compiler's log."""

    code: bytes
    log: str


@functools.lru_cache(maxsize=256)
def compile_cubin(
    source: str, defines: tuple[tuple[str, int | str], ...], architecture: str
) -> Compiled:
    """Compile cuda/`source` for an architecture such as "sm_90a". Needs no GPU."""
    from cuda.bindings import nvrtc

    text = (SOURCES / source).read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []))
    options = [f"--gpu-architecture={architecture}", "--std=c++17", f"--include-path={SOURCES}"]
    # Lambdas with template parameters need this option.
    options.append("--device-as-default-execution-space")
    options += [f"-D{name}={value}" for name, value in defines]
    result, *_ = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    size = _checked(nvrtc.nvrtcGetProgramLogSize(program))
    said = _read(size, lambda memory: nvrtc.nvrtcGetProgramLog(program, memory))
    log = said.rstrip(b"\0").decode()
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CudaError(f"{source} did not compile:\n{log}")
    size = _checked(nvrtc.nvrtcGetCUBINSize(program))
    code = _read(size, lambda memory: nvrtc.nvrtcGetCUBIN(program, memory))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return Compiled(code, log)


def is_hopper(device: torch.device) -> bool:
    """Return True for a GPU that the CUDA kernels are made for. Newer ones have less shared memory
    than their launches take, or no warpgroup products, and older ones no bulk copies."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


class Kernel:
    """A loaded kernel."""

    def __init__(self, function: Any, module: Any) -> None:
        self._function = function
        self._module = module  # keeps the code loaded

    def allow_shared_memory(self, nbytes: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, attribute, nbytes))

    def launch(
        self, grid: int, block: int, arguments: Sequence[Any], shared_memory: int = 0
    ) -> None:
        """Enqueue on the current stream. arguments: tensors (as pointers) or ctypes scalars."""
        from cuda.bindings import driver

        values = tuple(
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments
        )
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = torch.cuda.current_stream().cuda_stream
        _checked(
            driver.cuLaunchKernel(
                self._function, grid, 1, 1, block, 1, 1, shared_memory, stream,
                ctypes.addressof(pointers), 0,
            )
        )  # fmt: skip


def load(
    source: str, names: Sequence[str], defines: Mapping[str, int | str], device: torch.device
) -> tuple[Kernel, ...]:
    """Return kernels `names` of cuda/`source`, compiled for `device` and loaded there once a
    process."""
    return _load(source, tuple(names), tuple(sorted(defines.items())), device)


# Loaded code stays on the device, so nothing may be loaded twice.
@functools.cache
def _load(
    source: str,
    names: tuple[str, ...],
    defines: tuple[tuple[str, int | str], ...],
    device: torch.device,
) -> tuple[Kernel, ...]:
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    suffix = "a" if major >= 9 else ""
    code = compile_cubin(source, defines, f"sm_{major}{minor}{suffix}").code
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the primary context current
        module = _checked(driver.cuModuleLoadData(code))
        return tuple(
            Kernel(_checked(driver.cuModuleGetFunction(module, name.encode())), module)
            for name in names
        )


def _read(size: int, write: Callable[[bytes], tuple[Any, ...]]) -> bytes:
    """Return the `size` bytes that `write` fills, or b"" for at most one byte, the final zero."""
    # Python shares one object among all equal bytes of length 1, so none may be written to.
    if size <= 1:
        return b""
    memory = bytes(size)
    _checked(write(memory))
    return memory


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return the value of a cuda-bindings call. Raises CudaError if its status is not success."""
    status, *values = answer
    if int(status) != 0:
        raise CudaError(f"{type(status).__name__}: {status.name}")
    return values[0] if len(values) == 1 else None
