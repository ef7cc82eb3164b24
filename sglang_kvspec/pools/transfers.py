"""Small tensors on their way to the device."""

from __future__ import annotations

import torch


def sent_to(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """A copy on the device for which nobody waits: from pageable memory a large one would, for all
    that the device still has to do."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
