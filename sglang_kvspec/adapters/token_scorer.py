"""The scorer of a server's tokens, and what it is shown of SGLang's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_kvspec.adapters.compat.attention import RadixAttention
from sglang_kvspec.adapters.compat.runtime_context import get_parallel
from sglang_kvspec.core.compressor import Compressor
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.reference_attention import ReferenceAttention
from sglang_kvspec.runtime.token_scorer import TokenScorer
from sglang_kvspec.scorers.making import make_scorer
from sglang_kvspec.scorers.rotary import TableRotary


def make_token_scorer(
    compressor: Compressor,
    runner: Any,
    attention: ReferenceAttention | DeviceAttention,
    first_kv_head: int,
) -> TokenScorer:
    """Make the scorer that a compressor names, and show it all forwards of `attention`.

    runner: SGLang's ModelRunner. first_kv_head: number of the rank's first KV head. Raises
    ConfigError for wrong options, and UnsupportedError for a model that does not show what the
    scorer needs.
    """
    scorer = make_scorer(compressor)
    needs, blocks = scorer.needs, dict(_attention_blocks(runner.model))
    if not blocks:
        raise UnsupportedError(
            f"--kvspec-compressor {compressor.name} finds no attention layers in "
            f"{type(runner.model).__name__}"
        )
    rotary = None
    if needs.rotary:
        rotary = _rotary_of(next(iter(blocks.values())), compressor.name)
    made = TokenScorer(
        attention.kv,
        scorer,
        rotary,
        first_kv_head,
        frees_anchors=not compressor.keep_anchors,
    )
    if needs.hidden:
        made.show_hidden(_watch_inputs(blocks, runner.token_to_kv_pool.start_layer))
    model = runner.model_config
    num_ranks = get_parallel().attn_tp_size
    made.try_out(model.num_attention_heads // num_ranks, model.hidden_size)
    attention.show(made)
    runner.token_to_kv_pool.freed_listeners.append(made.on_pages_freed)
    return made


def _attention_blocks(model: torch.nn.Module) -> Iterator[tuple[int, torch.nn.Module]]:
    """Yield the module around each RadixAttention with the number of its layer."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, RadixAttention):
                yield child.layer_id, module


def _rotary_of(block: torch.nn.Module, name: str) -> TableRotary:
    embedding = getattr(block, "rotary_emb", None)
    table = getattr(embedding, "cos_sin_cache", None)
    if not isinstance(table, torch.Tensor) or table.ndim != 2:
        raise UnsupportedError(
            f"--kvspec-compressor {name} needs a model with rotary position embeddings by a table, "
            f"got {type(embedding).__name__} in {type(block).__name__}"
        )
    return TableRotary(table.float(), in_halves=bool(embedding.is_neox_style))


def _watch_inputs(blocks: dict[int, torch.nn.Module], start_layer: int) -> dict[int, torch.Tensor]:
    """Return a mapping that holds the input of the attention block that ran last, by layer."""
    inputs: dict[int, torch.Tensor] = {}

    def keep_of(layer: int) -> Callable[..., None]:
        def keep(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = named.get("hidden_states")
            if hidden is None:
                # Positions are integers.
                hidden = next(
                    part
                    for part in args
                    if isinstance(part, torch.Tensor) and part.is_floating_point()
                )
            # Inputs of all layers would take as much room as the KV of the forward.
            inputs.clear()
            inputs[layer] = hidden

        return keep

    for number, block in blocks.items():
        block.register_forward_pre_hook(keep_of(number - start_layer), with_kwargs=True)
    return inputs
