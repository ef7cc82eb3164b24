"""Entry points SGLang calls: the general plugin and the CPU platform plugin."""

from __future__ import annotations

import os


def register() -> None:
    """Install the command-line hooks, and all others where this process serves KVSpec.

    SGLang calls this once in every process that loads plugins, before flags are parsed. Hooks
    beyond the flags are installed only when KVSpec is on, so that a server started without
    `--kvspec` runs SGLang's own code.
    """
    from sglang_kvspec.adapters.environment import is_on
    from sglang_kvspec.composition import register_everything, register_flags

    register_flags()
    if is_on():
        register_everything()


def activate_platform() -> str | None:
    """Return the platform class for a machine without an accelerator, else None.

    Wrong --kvspec flags end the process here, since SGLang calls no plugin earlier.
    `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU engine and wins.
    """
    from sglang_kvspec.adapters.early_refusal import refuse_early

    refuse_early()
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    import torch

    accelerators = (torch.cuda, torch.xpu, torch.mps)
    if any(device.is_available() for device in accelerators):
        return None
    return "sglang_kvspec.adapters.platform.ReferencePlatform"
