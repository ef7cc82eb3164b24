"""Releases of SGLang that this package serves on."""

from __future__ import annotations

from sglang_kvspec.core.errors import UnsupportedError

# Oldest first. `make compat` tests each on a CPU.
SUPPORTED = ("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
# Those whose tests have also passed on a GPU.
SUPPORTED_ON_GPU = ("0.5.17",)
# Set to 1, it lets a server start on any other release.
UNTESTED_NAME = "SGLANG_KVSPEC_UNTESTED"

Version = tuple[int, ...]


def parse_version(text: str) -> Version:
    """Return the numbers of a release: (0, 5, 17) of 0.5.17 and of 0.5.17.post1. Raises
    UnsupportedError if it begins with none."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    if not numbers:
        raise UnsupportedError(f"SGLang {text} is installed, which has no release number")
    return tuple(numbers)


def refusal(installed: str, *, on_gpu: bool) -> str | None:
    """Return one sentence if a release is not supported, else None."""
    supported = SUPPORTED_ON_GPU if on_gpu else SUPPORTED
    if installed in supported:
        return None
    where = "on a GPU" if on_gpu else "on a CPU"
    return (
        f"--kvspec supports SGLang {', '.join(supported)} {where}, but SGLang {installed} is "
        f"installed: install a supported version, or set {UNTESTED_NAME}=1 to try this one"
    )
