"""What tells the KV of one model from that of another, for whatever outlives a server."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from typing import Any

import torch
from xxhash import xxh3_128

from sglang_kvspec.adapters.activation import config_of
from sglang_kvspec.adapters.target_choice import target_attention_name
from sglang_kvspec.runtime.ranks import Ranks

# What computes KV: another version may round otherwise, or have been wrong.
_VERSIONED = ("sglang", "torch")
_KERNELS = ("flashinfer-python", "triton")
# Bytes of a weight hashed at once, and so held twice.
_PART = 64 * 2**20
# Numbers of a weight mixed at once: 8 bytes each, twice, on a device that KV has filled.
_NUMBERS = 2**20
# Odd numbers, and so one-to-one on 64 bits: of splitmix64, as signed integers.
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    order = "any order"
    if server_args.enable_deterministic_inference:
        # Each deterministic attention has an order of its own.
        config = config_of(server_args)
        assert config is not None, "a plain server shares no KV"
        order = target_attention_name(config, deterministic=True)
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


def hash_of_all_ranks(model: torch.nn.Module, ranks: Ranks) -> str:
    """Of names, dtypes and numbers of all that a model is saved with, on all ranks together, which
    call this at once: the same however many they are. So it does not say where in a tensor a number
    is. What all ranks have alike counts once, and zeros, which fill up what does not divide, count
    nothing. Reads all weights.
    """
    weights = sorted(model.state_dict().items())
    names = [f"{name} {tensor.dtype}" for name, tensor in weights]
    own = [sum_of_hashes(tensor) for _, tensor in weights]
    of_ranks = ranks.everyones(own, about=names)
    found = xxh3_128()
    for name, sums in zip(names, zip(*of_ranks, strict=True), strict=True):
        total = sums[0] if len(set(sums)) == 1 else sum(sums)
        found.update(f"{name} {total % (1 << 64)}\n".encode())
    return found.hexdigest()


def sum_of_hashes(tensor: torch.Tensor) -> int:
    """Of the bits of every number, modulo 2^64 as a signed integer; 0 for nothing but zeros."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    dtype = _BITS.get(tensor.element_size(), torch.int64)
    bits = tensor.contiguous().view(-1).view(torch.uint8).view(dtype)
    for part in bits.split(_NUMBERS):
        # A copy, also of what has 64 bits.
        mixed = part.to(torch.int64, copy=True)
        for factor in _FACTORS:
            mixed.mul_(factor)
            # A logical shift.
            mixed.bitwise_xor_((mixed >> 31) & ((1 << 33) - 1))
        total += mixed.sum()
    return int(total)
