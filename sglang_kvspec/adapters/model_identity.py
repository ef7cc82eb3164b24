"""Identity of a model's KV, for prefix stores and for links between servers."""

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

# Raise it when this package computes other KV, or stores it in another way. Its own version would
# differ between equal installations: from a git checkout, it names the commit.
KV_VERSION = 2
# Packages that compute KV: another version may round differently, or have an error.
_VERSIONED = ("sglang", "torch")
_KERNELS = ("flashinfer-python", "triton")
# Bytes of a weight that are hashed at once, and therefore held twice.
_PART = 64 * 2**20
# Numbers of a weight that are mixed at once. Each takes 16 bytes, on a device that KV has filled.
_NUMBERS = 2**20
# Factors of splitmix64 as signed integers. They are odd: products modulo 2^64 are one-to-one.
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model_config: Any, weights: str, arithmetic: str) -> str:
    """Return a hash of a model at its path: path, configuration, versions, weights and arithmetic.

    weights: hash of the weights. arithmetic: see arithmetic_of().
    """
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
    """Return a hash of a model that does not depend on its path, nor on what computes it. For the
    latter see versions_of_kv() and arithmetic_of()."""
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
    """Return the versions that servers must have in common to use each other's KV."""
    others = (f"{name} {metadata.version(name)}" for name in _VERSIONED)
    return ", ".join([f"KV version {KV_VERSION}", *others])


def arithmetic_of(server_args: Any) -> str:
    """Return what determines the rounding of a server's KV: GPU, kernels and order of attention.

    bf16 KV of another GPU, or of kernels that are not batch-invariant, is as good but not equal:
    with it, a deterministic server would answer differently.
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
        # Sums of the two back ends differ. The exact target has Triton's alone.
        if config.target == "int8" and config.kernels == "triton":
            order += " in Triton"
    return f"{torch.cuda.get_device_name()}, {kernels}, {order}"


def hash_of_weights(model: torch.nn.Module) -> str:
    """Return a hash of names, dtypes, shapes and bytes of a model's state dict. Reads all weights,
    at several GB/s.

    Buffers that a model computes itself are left out: they follow from its configuration, and the
    length of some depends on a server's draft length.
    """
    found = xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        content = tensor.contiguous().view(-1).view(torch.uint8)
        for part in content.split(_PART):
            found.update(part.cpu().numpy())
    return found.hexdigest()


def hash_of_all_ranks(model: torch.nn.Module, ranks: Ranks) -> str:
    """Return a hash of names, dtypes and numbers of a model's state dict on all ranks together,
    equal for any number of ranks. All ranks must call this at once. Reads all weights.

    The hash does not depend on where in a tensor a number is. A tensor that is equal on all ranks
    counts once. Zeros, which pad tensors that do not divide evenly, count nothing.
    """
    weights = sorted(model.state_dict().items())
    names = [f"{name} {tensor.dtype}" for name, tensor in weights]
    own = [sum_of_hashes(tensor) for _, tensor in weights]
    of_ranks = ranks.gather(own, about=names)
    found = xxh3_128()
    for name, sums in zip(names, zip(*of_ranks, strict=True), strict=True):
        total = sums[0] if len(set(sums)) == 1 else sum(sums)
        found.update(f"{name} {total % (1 << 64)}\n".encode())
    return found.hexdigest()


def sum_of_hashes(tensor: torch.Tensor) -> int:
    """Return the sum of hashes of every number's bits, modulo 2^64 as a signed integer; 0 if all
    numbers are 0."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    dtype = _BITS.get(tensor.element_size(), torch.int64)
    bits = tensor.contiguous().view(-1).view(torch.uint8).view(dtype)
    for part in bits.split(_NUMBERS):
        # A copy, for 64-bit numbers too: they are mixed in place.
        mixed = part.to(torch.int64, copy=True)
        for factor in _FACTORS:
            mixed.mul_(factor)
            # A logical shift by 31 bits.
            mixed.bitwise_xor_((mixed >> 31) & ((1 << 33) - 1))
        total += mixed.sum()
    return int(total)
