"""Reference platform: SGLang's server and scheduler on a machine without an accelerator."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvspec.adapters.compat.platforms import CpuDeviceMixin, PlatformEnum, SRTPlatform


class ReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """Platform of any CPU, in plain torch. Without --kvspec, SGLang's own torch backend serves."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        # SGLang may have set its AMX backend, which needs kernels that this platform lacks.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = self.get_default_attention_backend()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang_kvspec.adapters.compat.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Leave the class to SGLang, which serves get_mha_kv_pool_cls() with a warning."""
        return None

    def get_paged_allocator_cls(self) -> type:
        from sglang_kvspec.adapters.allocator import KVSpecAllocator, TorchPagedAllocator
        from sglang_kvspec.adapters.environment import is_on

        return KVSpecAllocator if is_on() else TorchPagedAllocator

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    # SGLang asks for these when a profile starts, and has no default.
    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
