"""The sizes of a model, read from its Hugging Face config.json without loading anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_kvspec.core.errors import ConfigError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
# Longest context of a model whose config names none.
MAX_CONTEXT = 2**19
MAX_ROPE_FACTOR = 1024
# Feed-forward blocks of two matrices; all others have three (gate, up, down).
UNGATED_MODELS = frozenset({"opt", "gpt_neox", "phi", "starcoder2", "nemotron"})
# Keys of a config whose model keeps something other than one K and one V per token and head.
UNSUPPORTED_KEYS = {
    "kv_lora_rank": "MLA attention",
    "sliding_window": "sliding-window attention",
    "mamba_d_state": "Mamba layers",
    "ssm_cfg": "Mamba layers",
    "linear_num_key_heads": "linear attention",
    "text_config": "image or audio input",
    "vision_config": "image or audio input",
    "is_encoder_decoder": "an encoder-decoder architecture",
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Parameters by how often a decode step needs them, and the shape of the KV cache.

    dense_params: parameters that every token needs. expert_params: parameters of all num_experts
    routed experts, of which a token takes experts_per_token. embed_params: parameters that are
    looked up, never read whole. copied_params: those of dense_params of which drafts may have
    copies in 4 bits, which are all but routers.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_params: int
    embed_params: int
    copied_params: int = 0
    expert_params: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    weight_bytes_per_param: float = 2.0
    kv_dtype_bytes: int = 2
    kv_mantissa_bits: int = 7
    max_context: int = MAX_CONTEXT

    @property
    def expert_share(self) -> float:
        return self.experts_per_token / self.num_experts if self.num_experts else 1.0

    @property
    def num_params(self) -> int:
        return self.dense_params + self.embed_params + self.expert_params

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in memory."""
        return self.num_params * self.weight_bytes_per_param

    @property
    def params_per_token(self) -> float:
        """Parameters that one token multiplies with."""
        return self.dense_params + self.expert_params * self.expert_share

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token in a cache of the model's own KV dtype, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_dtype_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the shape from a config. Raises ConfigError for missing sizes and for models that
        KVSpec cannot serve."""
        _refuse_unsupported(config)
        hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
        heads = _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", default=heads)
        if config.get("head_dim") is None and hidden % heads:
            raise ConfigError(f"hidden_size {hidden} is not a multiple of {heads} attention heads")
        head_dim = _size(config, "head_dim", default=hidden // heads)
        if heads % kv_heads:
            raise ConfigError(f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
        vocabulary = _size(config, "vocab_size") * hidden
        tied = bool(config.get("tie_word_embeddings", False))
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        feed_forward = _FeedForward.from_config(config, hidden, layers)
        linear = layers * attention + feed_forward.dense_params
        return cls(
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            # A step reads the whole output projection, which is the embedding if tied.
            dense_params=linear + feed_forward.router_params + vocabulary,
            embed_params=0 if tied else vocabulary,
            copied_params=linear + vocabulary,
            expert_params=feed_forward.expert_params,
            num_experts=feed_forward.num_experts,
            experts_per_token=feed_forward.experts_per_token,
            weight_bytes_per_param=_weight_bytes(config),
            kv_dtype_bytes=_dtype_bytes(config),
            kv_mantissa_bits=MANTISSA_BITS[_dtype(config)],
            max_context=_longest_context(config),
        )

    def of_rank(self, tp: int) -> ModelShape:
        """Return the shape that one of `tp` tensor-parallel ranks holds. Every rank has at least
        one KV head: heads are repeated where ranks are more. Raises ConfigError for a `tp` that
        does not fit the heads."""
        if tp < 1 or self.num_heads % tp:
            raise ConfigError(
                f"--tp must divide the model's {self.num_heads} attention heads, got {tp}"
            )
        if max(tp, self.num_kv_heads) % min(tp, self.num_kv_heads):
            raise ConfigError(
                f"--tp must divide or be a multiple of the model's {self.num_kv_heads} KV heads, "
                f"got {tp}"
            )
        return replace(
            self,
            num_heads=self.num_heads // tp,
            num_kv_heads=max(self.num_kv_heads // tp, 1),
            dense_params=-(-self.dense_params // tp),
            embed_params=-(-self.embed_params // tp),
            copied_params=-(-self.copied_params // tp),
            expert_params=-(-self.expert_params // tp),
        )


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """Parameters of all layers' feed-forward blocks. dense_params: in linear layers of all
    tokens."""

    dense_params: int
    router_params: int = 0
    expert_params: int = 0
    num_experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], hidden: int, layers: int) -> _FeedForward:
        matrix = (2 if config.get("model_type") in UNGATED_MODELS else 3) * hidden
        keys = ("num_experts", "num_local_experts", "n_routed_experts")
        expert_key = next((key for key in keys if config.get(key)), None)
        if expert_key is None:
            return cls(layers * matrix * _size(config, "intermediate_size"))
        num_experts = _size(config, expert_key)
        per_token = _size(config, "num_experts_per_tok")
        if per_token > num_experts:
            raise ConfigError(f"num_experts_per_tok {per_token} exceeds {num_experts} experts")
        is_expert_layer = _expert_layers(config, layers)
        num_dense = layers - len(is_expert_layer)
        dense = num_dense * matrix * _size(config, "intermediate_size") if num_dense else 0
        width = _size(
            config, "moe_intermediate_size", default=config.get("intermediate_size") or None
        )
        shared = config.get("shared_expert_intermediate_size") or (
            (config.get("n_shared_experts") or 0) * width
        )
        num_sparse = len(is_expert_layer)
        return cls(
            dense_params=dense + num_sparse * matrix * shared,
            router_params=num_sparse * hidden * num_experts,
            expert_params=num_sparse * num_experts * matrix * width,
            num_experts=num_experts,
            experts_per_token=per_token,
        )


def _expert_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    """Indices of the layers that have routed experts."""
    dense_first = config.get("first_k_dense_replace") or 0
    step = config.get("decoder_sparse_step") or 1
    dense_only = set(config.get("mlp_only_layers") or ())
    return [
        layer
        for layer in range(dense_first, layers)
        if (layer + 1) % step == 0 and layer not in dense_only
    ]


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for key, kind in UNSUPPORTED_KEYS.items():
        if key == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        if config.get(key):
            raise ConfigError(
                f"KVSpec cannot serve a model with {kind} ({key} in its config); decoder-only "
                "models with full multi-head or grouped-query attention are supported"
            )
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ConfigError(
            f"KVSpec cannot serve a model with layers of type {sorted(kinds)[0]}; every layer "
            "must have full attention"
        )


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"the model's config has no {key}, which the plan needs")
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key} in the model's config must be a positive integer, got {value!r}")
    return value


def _longest_context(config: Mapping[str, Any]) -> int:
    """Return the most tokens of a context, stretched where the config scales rotary positions."""
    longest = _size(config, "max_position_embeddings", default=MAX_CONTEXT)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return longest
    factor = scaling.get("factor")
    if not isinstance(factor, (int, float)) or not 1 <= factor < MAX_ROPE_FACTOR:
        return longest
    # Without an original length, the factor applies to max_position_embeddings.
    trained = _size(scaling, "original_max_position_embeddings", default=longest)
    return max(longest, int(trained * factor))


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    return DTYPE_BYTES[_dtype(config)]


def _dtype(config: Mapping[str, Any]) -> str:
    # transformers 5 says dtype where 4 said torch_dtype.
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"dtype in the model's config must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}"
        )
    return str(dtype)


def _weight_bytes(config: Mapping[str, Any]) -> float:
    """Return the bytes of a parameter. Scales of quantised weights are not counted."""
    quantization = config.get("quantization_config")
    if not quantization:
        return float(_dtype_bytes(config))
    if isinstance(quantization, Mapping):
        if quantization.get("quant_method") == "fp8":
            return 1.0
        if quantization.get("bits") in (2, 3, 4, 8):
            return float(quantization["bits"] / 8)
    raise ConfigError(
        "quantization_config in the model's config does not give the size of the weights (allowed: "
        "quant_method fp8, or bits 2, 3, 4 or 8)"
    )
