"""Check that KVSpec can serve a model, from the model's configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvspec_kernels.codecs.coverage import EXACT, MAX_GROUP, MOST_ROTATED, TRITON_ATTENTION
from sglang_kvspec.adapters.kernel_choice import check_deterministic_sizes, check_kernels
from sglang_kvspec.adapters.target_choice import DETERMINISTIC, target_attention_name
from sglang_kvspec.adapters.weight_checkpoint import WeightCheckpoint
from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.codecs.registry import make_codec, tried_on_gpu
from sglang_kvspec.core.config import KVSpecConfig, Target
from sglang_kvspec.core.errors import ConfigError, UnsupportedError

# Head sizes of models on a GPU, by --kvspec-target. Kernels of `int8` take others as well, which no
# model in use has.
INT8_HEAD_SIZES = (64, 80, 96, 112, 128, 256)
GPU_HEAD_SIZES: Mapping[Target, tuple[int, ...]] = {
    "exact": EXACT.head_dims,
    "int8": tuple(size for size in TRITON_ATTENTION.head_dims if size in INT8_HEAD_SIZES),
}

# Parts that KVSpec lacks for the models that it refuses. docs/reference/limits.md says more.
NEEDED: Mapping[str, str] = {
    "MLA attention": "anchors of latents that K and V share, and kernels that read them",
    "sliding-window attention": "a second pool for the layers with windows",
    "Mamba or linear attention": "a snapshot of the layers' state for every draft",
    "an encoder-decoder architecture": "cross attention over a second cache",
    "image or audio input": "positions and embeddings of inputs that are not tokens",
    "no generation (embedding or reward)": "tokens to draft",
    "soft-capped attention logits": "the cap in every attention kernel",
}


def check_model(
    config: KVSpecConfig,
    model: Any,
    page_size: int,
    *,
    on_gpu: bool = False,
    num_ranks: int = 1,
    deterministic: bool = False,
) -> None:
    """Raise UnsupportedError (model kind) or ConfigError (head size, ranks) naming what is allowed.

    model: SGLang's ModelConfig; no weights are read. num_ranks: ranks that share the heads.
    deterministic: --enable-deterministic-inference is on.
    """
    from sglang_kvspec.adapters.compat.model_config import AttentionArch

    text = model.hf_text_config
    kinds = {
        "MLA attention": model.attention_arch == AttentionArch.MLA,
        "sliding-window attention": _has_sliding_window(model, text),
        "Mamba or linear attention": _has_recurrent_state(model),
        "an encoder-decoder architecture": bool(model.is_encoder_decoder),
        "image or audio input": bool(model.is_multimodal),
        "no generation (embedding or reward)": not model.is_generation,
        "soft-capped attention logits": bool(getattr(text, "attn_logit_softcapping", None)),
    }
    for kind, present in kinds.items():
        if present:
            raise UnsupportedError(
                f"--kvspec cannot serve {model.model_path}: the model has {kind}, which would need "
                f"{NEEDED[kind]} (allowed: decoder-only models with full multi-head or "
                "grouped-query attention)"
            )
    if model.v_head_dim != model.head_dim:
        raise UnsupportedError(
            f"--kvspec cannot serve {model.model_path}: K heads have size "
            f"{model.head_dim} and V heads have size {model.v_head_dim} (allowed: equal sizes)"
        )
    _check_ranks(model, num_ranks, on_gpu)
    if config.weight_checkpoint is not None:
        if num_ranks > 1:
            raise UnsupportedError(
                f"--kvspec-draft-weights {config.weight_checkpoint} cannot be shared out to "
                f"{num_ranks} ranks (allowed: auto, int4, target)"
            )
        # Reads no weights, but says now what would fail behind the model's load.
        WeightCheckpoint(config.weight_checkpoint)
    if on_gpu:
        _check_for_kernels(config, model, num_ranks)
    codec = make_codec(
        config.codec,
        target=config.target,
        anchor_bits=config.anchor_bits,
        page_size=page_size,
        head_dim=model.head_dim,
        dtype=model.dtype,
        packs=config.packs_residuals,
    )
    if on_gpu and not codec.settings.has_kernels:
        allowed = ", ".join(tried_on_gpu())
        raise UnsupportedError(
            f"--kvspec-codec {config.codec} has no GPU kernels and serves on a CPU only "
            f"(allowed on a GPU: {allowed})"
        )
    if on_gpu:
        _check_rotation(config, model, codec, page_size)
        check_kernels(config, model, codec, page_size, num_ranks)
        name = target_attention_name(config, deterministic=deterministic)
        if name == DETERMINISTIC["exact"]:
            check_deterministic_sizes(model, page_size)


def _check_rotation(config: KVSpecConfig, model: Any, codec: Codec, page_size: int) -> None:
    """Raise UnsupportedError for heads that kernels of a codec with rotated values do not take."""
    if codec.settings.triton_decode(page_size).rotates and model.head_dim > MOST_ROTATED:
        raise UnsupportedError(
            f"--kvspec-codec {config.codec} cannot serve {model.model_path} on a GPU: head size "
            f"{model.head_dim} (allowed: up to {MOST_ROTATED})"
        )


def _check_ranks(model: Any, num_ranks: int, on_gpu: bool) -> None:
    """Raise ConfigError unless all ranks have equally many heads. On a GPU, ranks may share a KV
    head, each with a copy. On a CPU, SGLang would add heads for which its loader has no weights."""
    heads, kv_heads = model.num_attention_heads, model.get_total_num_kv_heads()
    shares = kv_heads % num_ranks == 0 or (on_gpu and num_ranks % kv_heads == 0)
    if heads % num_ranks or not shares:
        raise ConfigError(
            f"--tp-size {num_ranks} cannot serve {model.model_path} with --kvspec: the model has "
            f"{heads} heads and {kv_heads} KV heads (allowed: numbers of ranks that divide both"
            f"{', or multiples of the KV heads' if on_gpu else ''})"
        )


def _check_for_kernels(config: KVSpecConfig, model: Any, num_ranks: int) -> None:
    """Raise UnsupportedError for a model that the kernels of a GPU do not cover: KVSpec's, or for
    the target `exact` FlashInfer's."""
    kv_heads = model.get_num_kv_heads(num_ranks)
    group = model.num_attention_heads // num_ranks // kv_heads
    sizes, dtype = GPU_HEAD_SIZES[config.target], str(model.dtype).removeprefix("torch.")
    for what, value, allowed, fits in (
        ("head size", model.head_dim, sizes, model.head_dim in sizes),
        ("dtype", dtype, EXACT.dtypes, dtype in EXACT.dtypes),
        ("query heads per KV head", group, f"1 to {MAX_GROUP}", group <= MAX_GROUP),
    ):
        if not fits:
            raise UnsupportedError(
                f"--kvspec cannot serve {model.model_path} on a GPU: {what} {value} "
                f"(allowed: {allowed})"
            )
    if config.draft_weights not in ("auto", "target") and model.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"--kvspec-draft-weights {config.draft_weights} cannot serve {model.model_path} on a "
            f"GPU: dtype {model.dtype} (allowed: --dtype bfloat16, or --kvspec-draft-weights "
            "target)"
        )


def model_config_of(fields: dict[str, Any]) -> Any:
    """Return SGLang's ModelConfig for ServerArgs fields, before ServerArgs has resolved them.

    SGLang's own resolution asserts on some models that KVSpec refuses. The refusal must come first.
    """
    from sglang_kvspec.adapters.compat.model_config import ModelConfig

    names = {
        "trust_remote_code": "trust_remote_code",
        "revision": "revision",
        "context_length": "context_length",
        "json_model_override_args": "model_override_args",
        "dtype": "dtype",
        "quantization": "quantization",
    }
    given = {ours: fields[theirs] for theirs, ours in names.items() if theirs in fields}
    return ModelConfig(fields["model_path"], **given)


def _has_sliding_window(model: Any, text: Any) -> bool:
    if getattr(model, "is_hybrid_swa", False):
        return True
    if getattr(text, "use_sliding_window", True) is False:
        return False
    return bool(getattr(text, "sliding_window", None))


def _has_recurrent_state(model: Any) -> bool:
    from sglang_kvspec.adapters.compat.hybrid_models import mambaish_config

    return mambaish_config(model) is not None
