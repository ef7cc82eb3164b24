"""What tells the KV of one model from that of another, for whatever outlives a server."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from typing import Any

import torch
from xxhash import xxh3_128

# What computes KV: another version may round otherwise, or have been wrong.
_VERSIONED = ("sglang", "torch")
_KERNELS = ("flashinfer-python", "triton")
# Bytes of a weight hashed at once, and so held twice.
_PART = 64 * 2**20


def fingerprint(model_config: Any, weights: str, arithmetic: str) -> str:
    """Of a model where it lies: path, configuration, versions, weights, by their hash, and what
    computes it: see arithmetic_of()."""
    facts = {
        "path": str(model_config.model_path),
        "revision": model_config.revision,
        "config": model_config.hf_config.to_json_string(),
        "dtype": str(model_config.dtype),
        "versions": {name: metadata.version(name) for name in _VERSIONED},
        "weights": weights,
        "arithmetic": arithmetic,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def portable_fingerprint(model_config: Any, weights: str) -> str:
    """The same of a model wherever it lies, and whatever computes it: see versions_of_kv() and
    arithmetic_of()."""
    config = model_config.hf_config.to_dict()
    config.pop("_name_or_path", None)
    facts = {
        "config": config,
        "dtype": str(model_config.dtype),
        "weights": weights,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def versions_of_kv() -> str:
    """What two servers that use each other's KV must have alike."""
    names = ("sglang-kvspec", *_VERSIONED)
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def arithmetic_of(server_args: Any) -> str:
    """What rounds a server's KV. In bf16 that of another GPU, or of kernels that depend on what
    runs beside them, is as good, but not the same: a deterministic server would answer otherwise.
    """
    if server_args.device == "cpu":
        return "cpu"
    kernels = ", ".join(f"{name} {metadata.version(name)}" for name in _KERNELS)
    order = "deterministic" if server_args.enable_deterministic_inference else "any order"
    return f"{torch.cuda.get_device_name()}, {kernels}, {order}"


def hash_of_weights(model: torch.nn.Module) -> str:
    """Of names, shapes and bytes of all that a model is saved with. Buffers that it computes for
    itself follow from its configuration, and some are as long as a server's drafts want them. Reads
    all weights, at several GB/s.
    """
    found = xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        content = tensor.contiguous().view(-1).view(torch.uint8)
        for part in content.split(_PART):
            found.update(part.cpu().numpy())
    return found.hexdigest()
