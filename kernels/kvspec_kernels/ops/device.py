"""Properties of a device that launches need."""

from __future__ import annotations

from functools import cache

import torch

# Compute capabilities, by their first number, with 227 KiB of shared memory a block and bulk copies
# (Hopper and Blackwell of data centres). A block of any other GPU since 8.0 has 99 KiB or more.
LARGE = (9, 10)
LARGE_BYTES, SMALL_BYTES = 227 * 1024, 99 * 1024


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU. A CPU interprets the launches of Hopper: 9.0."""
    if device.type != "cuda":
        return 9, 0
    return torch.cuda.get_device_capability(device)


def is_large(device: torch.device) -> bool:
    """Return True for a GPU that the launches of Hopper fit. Launches of other GPUs keep to
    SMALL_BYTES of shared memory a block, and use no bulk copies."""
    return capability(device)[0] in LARGE
