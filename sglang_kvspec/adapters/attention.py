"""SGLang's attention backend `kvspec`: plain torch on a CPU, kernels on a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch

from sglang_kvspec.adapters.activation import config_of
from sglang_kvspec.adapters.compat.attention import (
    ATTENTION_BACKENDS,
    AttentionBackend,
    AttentionType,
    LogitsProcessor,
    RadixAttention,
    register_attention_backend,
)
from sglang_kvspec.adapters.compat.parallel_state import get_tp_group
from sglang_kvspec.adapters.compat.server_args import (
    add_attention_backend_choices,
    add_deterministic_attention_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)
from sglang_kvspec.adapters.products import check_products
from sglang_kvspec.adapters.target_choice import load_target_attention
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.reference_attention import ReferenceAttention

NAME = "kvspec"


class KVSpecAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Attention over the forward that the worker planned. Needs no forward metadata of SGLang."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.attention = _attention_over(runner.token_to_kv_pool.kv, runner)
        self._start_layer = runner.token_to_kv_pool.start_layer
        # SGLang finds the pools of a forward by these attributes.
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        for module in runner.model.modules():
            if isinstance(module, RadixAttention):
                _check_attention(module, isinstance(self.attention, DeviceAttention))
            if isinstance(module, LogitsProcessor):
                check_logits(module, get_tp_group().world_size)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        pass

    def support_triton(self) -> bool:
        return False

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Store k and v, and attend. Return the output [num_tokens, heads * head_dim].

        q: [num_tokens, heads * head_dim]. k, v: [num_tokens, kv_heads * head_dim]. Raises
        UnsupportedError for attention that KVSpec does not implement, such as k None.
        """
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        _check_call(k, save_kv_cache, kwargs)
        out = self.attention.forward(
            layer.layer_id - self._start_layer,
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim),
            layer.scaling,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)


def _attention_over(kv: PagedKVCache, runner: Any) -> ReferenceAttention | DeviceAttention:
    if isinstance(kv, GpuKVCache):
        from sglang_kvspec.adapters.compat.runtime_context import get_parallel

        num_heads = runner.model_config.num_attention_heads // get_parallel().attn_tp_size
        args = runner.server_args
        config = config_of(args)
        assert config is not None, "a plain server has no KVSpec attention"
        if args.enable_deterministic_inference:
            check_products(kv.device, runner.dtype)
        make = load_target_attention(config, deterministic=args.enable_deterministic_inference)
        return DeviceAttention(kv, num_heads, make(kv, num_heads))
    assert isinstance(kv, ReferenceKVCache)
    return ReferenceAttention(kv)


def _check_attention(layer: RadixAttention, on_gpu: bool) -> None:
    """Raise UnsupportedError for a layer that KVSpec would compute wrongly."""
    scale = layer.head_dim**-0.5
    reasons = {
        "cross attention": layer.is_cross_attention,
        "encoder attention": layer.attn_type != AttentionType.DECODER,
        "soft-capped logits": bool(layer.logit_cap),
        "a sliding window": layer.sliding_window_size not in (None, -1),
        f"the scale {layer.scaling} instead of 1/sqrt(head size), on a GPU": on_gpu
        and not math.isclose(layer.scaling, scale, rel_tol=1e-6),
    }
    _refuse_any(reasons)


def check_logits(processor: Any, num_ranks: int) -> None:
    """Raise UnsupportedError if ranks do not gather logits from one another: drafts that the device
    chooses, step after step, could then differ between ranks.

    processor: the model's LogitsProcessor.
    """
    is_split = num_ranks > 1 and not processor.do_tensor_parallel_all_gather
    _refuse_any({f"logits that its {num_ranks} ranks do not gather": is_split})


def _check_call(k: Any, save_kv_cache: bool, extra: dict[str, Any]) -> None:
    unknown = [name for name, value in extra.items() if value is not None]
    reasons = {
        "KV shared between layers or written by the model": k is None or not save_kv_cache,
        f"the argument {unknown[0] if unknown else None}": bool(unknown),
    }
    _refuse_any(reasons)


def _refuse_any(reasons: dict[str, bool]) -> None:
    for reason, present in reasons.items():
        if present:
            raise UnsupportedError(f"--kvspec cannot serve a model with {reason}")


def register() -> None:
    """Register the backend's name with SGLang, once a process."""
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(KVSpecAttentionBackend)
        add_attention_backend_choices([NAME])
        add_deterministic_attention_backend_choices([NAME])
        add_radix_supported_deterministic_attention_backend_choices([NAME])
