"""Sizes read from config.json, compared with parameter counts that the models' makers publish."""

from __future__ import annotations

import pytest

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.model_shape import ModelShape

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "use_sliding_window": False,
    "sliding_window": None,
    "dtype": "bfloat16",
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "sliding_window": None,
}


@pytest.mark.parametrize(
    ("config", "billions", "active", "kv_bytes"),
    [
        (LLAMA_8B, 8.03, 8.03, 131072),
        (QWEN3_32B, 32.8, 32.8, 262144),
        (QWEN3_30B_A3B, 30.5, 3.3, 98304),
        (MIXTRAL_8X7B, 46.7, 12.9, 131072),
    ],
    ids=["llama-8b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b"],
)
def test_published_sizes(config, billions, active, kv_bytes):
    shape = ModelShape.from_config(config)
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=0.005)
    assert (shape.params_per_token + shape.embed_params) / 1e9 == pytest.approx(active, rel=0.03)
    assert shape.kv_bytes_per_token == kv_bytes
    assert shape.weight_bytes == 2 * shape.num_params


def test_shared_and_first_dense_layers_count():
    config = {**QWEN3_30B_A3B, "n_shared_experts": 1, "first_k_dense_replace": 1}
    shape, plain = ModelShape.from_config(config), ModelShape.from_config(QWEN3_30B_A3B)
    expert = 3 * 2048 * 768
    assert plain.expert_params - shape.expert_params == 128 * expert
    dense = 3 * 2048 * 6144 + 47 * expert - 2048 * 128
    assert shape.dense_params - plain.dense_params == dense


def test_tied_embeddings_are_held_once_and_read_for_the_output():
    tied = ModelShape.from_config({**LLAMA_8B, "tie_word_embeddings": True})
    untied = ModelShape.from_config(LLAMA_8B)
    assert tied.dense_params == untied.dense_params
    assert untied.num_params - tied.num_params == 128256 * 4096


@pytest.mark.parametrize(
    ("quantization", "nbytes"),
    [({"quant_method": "fp8"}, 1.0), ({"quant_method": "awq", "bits": 4}, 0.5)],
    ids=["fp8", "awq"],
)
def test_quantised_weights(quantization, nbytes):
    shape = ModelShape.from_config({**LLAMA_8B, "quantization_config": quantization})
    assert shape.weight_bytes_per_param == nbytes
    assert shape.kv_bytes_per_token == 131072


def test_ranks_share_heads_and_weights():
    whole = ModelShape.from_config(QWEN3_32B)
    rank = whole.of_rank(4)
    assert (rank.num_heads, rank.num_kv_heads) == (16, 2)
    assert rank.num_params == pytest.approx(whole.num_params / 4, rel=1e-6)
    # 8 KV heads on 16 ranks: each head is held twice.
    assert whole.of_rank(16).num_kv_heads == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": "many"}, "vocab_size .* positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers .* positive integer"),
        ({"num_key_value_heads": 5}, "32 attention heads cannot share 5"),
        ({"num_attention_heads": 31, "num_key_value_heads": 31}, "not a multiple of 31"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"sliding_window": 4096}, "sliding-window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"text_config": {"hidden_size": 1}}, "image or audio"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"torch_dtype": "float8"}, "dtype"),
        ({"quantization_config": {"quant_method": "exl3"}}, "quantization_config"),
        ({"num_experts": 8}, "no num_experts_per_tok"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "exceeds 8 experts"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelShape.from_config({**LLAMA_8B, **change})


@pytest.mark.parametrize("tp", [0, 3, 64])
def test_ranks_must_divide_heads(tp):
    with pytest.raises(ConfigError, match="--tp"):
        ModelShape.from_config(LLAMA_8B).of_rank(tp)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 32768),
        ({"rope_type": "linear", "factor": 2.0}, 65536),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 2048}, 32768),
        ({"rope_type": "default"}, 32768),
        ({"type": "dynamic", "factor": "x"}, 32768),
        ({"type": "dynamic", "factor": float("nan")}, 32768),
    ],
)
def test_scaled_positions_lengthen_the_context(scaling, longest):
    config = {**LLAMA_8B, "max_position_embeddings": 32768, "rope_scaling": scaling}
    assert ModelShape.from_config(config).max_context == longest
