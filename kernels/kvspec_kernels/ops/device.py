"""Properties of a device that launches need."""

from __future__ import annotations

from functools import cache

import torch


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
