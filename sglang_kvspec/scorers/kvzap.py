"""KVzap: a linear model that predicts KVzip's scores from hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import SCORERS
from sglang_kvspec.scorers.base import ALWAYS, About, Allocation, LayerChunk, Needs
from sglang_kvspec.scorers.options import require, require_file

# Largest logarithm of a score: sums of a page's scores stay finite.
_LARGEST_LOG = 60.0


@dataclass(frozen=True, slots=True)
class KVzap:
    """Scorer by a linear surrogate of KVzip, which reads the inputs of attention layers.

    Source: Jégou, Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning",
    arXiv 2601.07891. The paper also has surrogates of two layers, and drops what lies below a fixed
    threshold; here a budget decides. The surrogate predicts the logarithm of a score. Scores are
    their exponentials, as those of KVzip are sums over pages, too.

    file: safetensors with layers.{i}.weight [num_kv_heads, hidden_size] and layers.{i}.bias
    [num_kv_heads] of all KV heads of the model, for layers 0, 1, ...; read once in a process.
    window: last tokens of the prompt that drafts always read. Drafts also read a cached prefix in
    any case, as its hidden states are unknown.
    """

    about: ClassVar[About] = About(
        "KVzap (Jégou, Jeblick, arXiv 2601.07891)",
        "tokens that KVzip would keep, as a trained linear model predicts",
        "one product with hidden states; training once a model",
    )
    needs: ClassVar[Needs] = Needs(hidden=True)
    # One threshold for all heads, as in the paper.
    allocation: ClassVar[Allocation] = "model"

    file: str = ""
    window: int = 128

    def __post_init__(self) -> None:
        """Raises ConfigError without a file, and for a file that holds no surrogate."""
        require_file("kvzap", self.file, "benchmarks/train_kvzap.py")
        require(self.window >= 1, "kvzap", "window", self.window, "1 or more")
        _read_layers(self.file)

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        """Return scores as Scorer says. Raises ConfigError for a surrogate of another model."""
        assert chunk.hidden is not None
        weight, bias = self._of_heads(chunk, chunk.hidden)
        logs = torch.addmm(bias, chunk.hidden.float(), weight.T).T
        # Tokens of the former window, which have been given ALWAYS, get their scores now.
        pending = chunk.memory.get("logs", logs[:, :0])
        logs = torch.cat((pending, logs), dim=-1)
        chunk.memory["logs"] = logs[:, -self.window :].clone()
        known = chunk.scores[:, : chunk.end - logs.shape[1]]
        scores = torch.cat((known, logs.clamp(max=_LARGEST_LOG).exp()), dim=-1)
        scores[:, -self.window :] = ALWAYS
        return scores

    def _of_heads(self, chunk: LayerChunk, hidden: torch.Tensor) -> _Layer:
        """Return the layer's surrogate of the chunk's KV heads, on the device of hidden."""
        heads = slice(chunk.first_kv_head, chunk.first_kv_head + chunk.keys.shape[1])
        if chunk.layer < len(_read_layers(self.file)):
            weight, bias = _layer_on(self.file, chunk.layer, hidden.device)
            if heads.stop <= len(weight) and hidden.shape[1] == weight.shape[1]:
                return _Layer(weight[heads], bias[heads])
        raise ConfigError(
            f"{SCORERS.flag} kvzap:file={self.file} is of another model: layer {chunk.layer}, "
            f"{heads.stop} KV heads and hidden size {hidden.shape[1]} are needed"
        )


class _Layer(NamedTuple):
    """Surrogate of one layer. weight: [num_kv_heads, hidden_size] float32; bias: [num_kv_heads]
    float32."""

    weight: torch.Tensor
    bias: torch.Tensor


@cache
def _layer_on(file: str, layer: int, device: torch.device) -> _Layer:
    """Return a layer's surrogate on the device, copied once."""
    weight, bias = _read_layers(file)[layer]
    return _Layer(weight.to(device), bias.to(device))


@cache
def _read_layers(file: str) -> tuple[_Layer, ...]:
    """Return the surrogates of all layers in CPU memory, all KV heads of the model."""
    place = f"{SCORERS.flag} kvzap:file={file}"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{place} cannot be read as safetensors: {error}") from error
    layers: list[_Layer] = []
    while f"layers.{len(layers)}.weight" in tensors:
        name = f"layers.{len(layers)}"
        weight, bias = tensors[f"{name}.weight"].float(), tensors.get(f"{name}.bias")
        if weight.ndim != 2 or bias is None or bias.shape != weight.shape[:1]:
            raise ConfigError(
                f"{place}: {name} needs weight [num_kv_heads, hidden_size] and bias [num_kv_heads]"
            )
        layer = _Layer(weight, bias.float())
        if not all(part.isfinite().all() for part in layer):
            raise ConfigError(f"{place}: {name} has numbers that are not finite")
        layers.append(layer)
    if not layers:
        raise ConfigError(f"{place} has no layers.0.weight")
    return tuple(layers)
