"""Inputs of linear layers, measured on text that the model writes itself.

Weights are rounded best if one knows what their inputs are like. Text of the model's own serves as
well as text of its kind (docs/benchmarks/draft-weights.md), and needs no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from sglang_kvspec.adapters.compat.forward import ForwardContext, forward_context
from sglang_kvspec.adapters.decode_batch import decode_batch, run_model

# Attention of a layer over queries, keys and values [tokens, heads, head size], to outputs of the
# queries' shape.
Attend = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class NoPool:
    """Stand-in for SGLang's KV pool. dtype: None, so that no model stores KV in it by itself."""

    dtype = None


class TextAttention:
    """Attention backend for forwards outside of SGLang's pools, by `attend`."""

    # Some models look for the pool here.
    token_to_kv_pool = NoPool()

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        *others: Any,
        **more: Any,
    ) -> torch.Tensor:
        """Return the output [num_tokens, heads * head size]. Reads no forward batch."""
        heads = ((q, layer.tp_q_head_num), (k, layer.tp_k_head_num), (v, layer.tp_k_head_num))
        parts = [part.reshape(len(part), count, -1) for part, count in heads]
        return self._attend(layer, *parts).flatten(1)


def attend_to_whole_text(
    layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attend with all tokens of one text at once."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, scale=layer.scaling, enable_gqa=True, is_causal=True
    )
    return out[0].transpose(0, 1)


class InputMoment:
    """Product of a linear layer that sums x^T x of its inputs. moment: fp32 [K, K]."""

    def __init__(self, method: Any, num_inputs: int, device: torch.device) -> None:
        self._method = method
        self.moment = torch.zeros(num_inputs, num_inputs, device=device)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.flatten(0, -2).float()
        # tf32 has 8 bits of exponent and 11 significant bits, so it holds both dtypes exactly.
        with tf32_products(x.dtype in (torch.bfloat16, torch.float16)):
            self.moment.addmm_(rows.t(), rows)
        out: torch.Tensor = self._method.apply(layer, x, bias)
        return out


@contextmanager
def tf32_products(is_allowed: bool) -> Iterator[None]:
    """Let a GPU multiply fp32 in tensor cores if `is_allowed`, else exactly. Sums are fp32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def products_of(layers: Sequence[Any], products: Sequence[Any]) -> Iterator[None]:
    """Let layers multiply by other methods than their own."""
    own = [layer.quant_method for layer in layers]
    try:
        for layer, product in zip(layers, products, strict=True):
            layer.quant_method = product
        yield
    finally:
        for layer, method in zip(layers, own, strict=True):
            layer.quant_method = method


def groups_within(layers: Sequence[Any], budget_bytes: int) -> Iterator[list[Any]]:
    """Cut layers into groups, in order, whose moments take up to budget_bytes together. A layer
    that takes more is a group of its own."""
    group: list[Any] = []
    taken = 0
    for layer in layers:
        if group and taken + moment_bytes(layer) > budget_bytes:
            yield group
            group, taken = [], 0
        group.append(layer)
        taken += moment_bytes(layer)
    if group:
        yield group


def moment_bytes(layer: Any) -> int:
    """Return the bytes of the layer's InputMoment."""
    return torch.float32.itemsize * int(layer.weight.shape[1]) ** 2


@torch.inference_mode()
def input_moments(runner: Any, layers: Sequence[Any], texts: torch.Tensor) -> list[torch.Tensor]:
    """Return the sum of x^T x over the inputs of each layer, fp32 [K, K], in forwards of the model
    over texts [count, length] int64, one at a time."""
    measured = [
        InputMoment(layer.quant_method, layer.weight.shape[1], layer.weight.device)
        for layer in layers
    ]
    positions = torch.arange(texts.shape[1], device=texts.device)
    attention = TextAttention(attend_to_whole_text)
    context = forward_context(ForwardContext(attn_backend=attention))
    with context, products_of(layers, measured):
        for text in texts:
            run_model(runner, decode_batch(runner, text, positions))
    return [each.moment for each in measured]
