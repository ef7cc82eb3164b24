"""Attention layer of transformers as a press of kvpress reads it, made of a chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvspec.scorers.base import LayerChunk, Rotary

# Projections of hidden states that a press may ask for.
QUERIES, KEYS = "q_proj", "k_proj"


class Shown:
    """Attributes that a press may read. Names of others that it asks for are added to `lacking`."""

    def __init__(self, place: str, lacking: list[str], **attributes: Any) -> None:
        self.__dict__.update(attributes, _place=place, _lacking=lacking)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._lacking.append(self._place + name)
        raise AttributeError(f"a server shows presses no {self._place}{name}")


@dataclass(slots=True)
class PressLayer:
    """Arguments of ScorerPress.score, and what the press did with them.

    hidden_states: [1, n, channels], the newest n tokens. keys, values: [1, num_kv_heads,
    num_tokens, head_dim]. used: projections that the press called. lacking: attributes that it
    asked for and that a server does not show.
    """

    module: Shown
    hidden_states: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    kwargs: dict[str, Any]
    used: set[str]
    lacking: list[str]

    def scores_of(self, press: Any, attentions: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the press returns. Raises whatever the press raises."""
        scores: torch.Tensor = press.score(
            self.module, self.hidden_states, self.keys, self.values, attentions, self.kwargs
        )
        return scores


def layer_of(
    chunk: LayerChunk, queries: torch.Tensor | None, reads_keys: bool, unread: int = 0
) -> PressLayer:
    """Show a chunk, and all tokens before it, as an attention layer.

    Presses read hidden states through the projections of queries and keys, before the rotary
    embedding. Hidden states are therefore those queries and keys side by side, and a projection
    cuts its channels out. unread: number of further channels, which no projection reads.

    queries: [n, num_heads, head_dim] of the newest n tokens, before the rotary embedding; None for
    a press that reads none. reads_keys: True for a press that reads keys before the rotary
    embedding.
    """
    rotary = chunk.rotary
    assert rotary is not None
    num_kv_heads, head_dim = chunk.keys.shape[1:]
    order = half_split_order(rotary, head_dim, chunk.keys.device)
    first = 0 if queries is None else chunk.end - len(queries)
    parts = {QUERIES: chunk.keys.new_empty((chunk.end - first, 0))}
    if queries is not None:
        # Presses divide products by sqrt(head_dim), whatever the model does.
        factor = chunk.scale * math.sqrt(head_dim)
        scaled = queries if math.isclose(factor, 1, rel_tol=1e-6) else queries * factor
        parts[QUERIES] = scaled[..., order].flatten(1)
    if reads_keys:
        positions = torch.arange(first, chunk.end, device=chunk.keys.device)
        unrotated = rotary.unrotate(chunk.keys[first:].float(), positions).to(chunk.keys.dtype)
        parts[KEYS] = unrotated[..., order].flatten(1)
    noise = chunk.values[first:].flatten(1)[:, :unread]
    used: set[str] = set()
    lacking: list[str] = []

    def rotary_emb(like: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [1, n, head_dim] at positions that count from `first`: presses
        take positions from the length of hidden states."""
        return cos_sin(rotary, ids[0] + first, order, like.dtype)

    ends = torch.tensor([part.shape[1] for part in parts.values()]).cumsum(0).tolist()
    cuts = {
        name: _Cut(end - part.shape[1], end, used, name)
        for (name, part), end in zip(parts.items(), ends, strict=True)
    }
    module = Shown(
        "",
        lacking,
        config=Shown(
            "config.",
            lacking,
            num_attention_heads=chunk.queries.shape[1],
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
        ),
        head_dim=head_dim,
        num_key_value_groups=chunk.queries.shape[1] // num_kv_heads,
        layer_idx=chunk.layer,
        rotary_emb=rotary_emb,
        **cuts,
    )
    positions = torch.arange(chunk.end - first, device=chunk.keys.device)
    return PressLayer(
        module=module,
        hidden_states=torch.cat((*parts.values(), noise), dim=1)[None],
        keys=chunk.keys[..., order].transpose(0, 1).contiguous()[None],
        values=chunk.values.transpose(0, 1).contiguous()[None],
        kwargs={"position_embeddings": rotary_emb(chunk.keys, positions[None])},
        used=used,
        lacking=lacking,
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """Projection that returns some channels of hidden states, and notes its name in `used`."""

    begin: int
    end: int
    used: set[str]
    name: str

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.used.add(self.name)
        return hidden_states[..., self.begin : self.end].contiguous()


def half_split_order(rotary: Rotary, head_dim: int, device: torch.device) -> torch.Tensor:
    """Return an order [head_dim] of channels in which channel i is rotated with channel i +
    head_dim / 2, as presses rotate. Channels that the model does not rotate come in pairs, too."""
    basis = torch.eye(head_dim, device=device)[:, None]
    ones = torch.ones(head_dim, dtype=torch.int64, device=device)
    mixed = rotary.rotate(basis, ones)[:, 0].fill_diagonal_(0).abs()
    # Looked at on the CPU, so that a GPU is waited for once, not once a channel.
    partners = [int(row.argmax()) if bool(row.any()) else None for row in mixed.cpu().unbind()]
    firsts = [i for i, other in enumerate(partners) if other is not None and other > i]
    seconds = [other for other in (partners[i] for i in firsts) if other is not None]
    still = [i for i, other in enumerate(partners) if other is None]
    half = len(still) // 2
    return torch.tensor([*firsts, *still[:half], *seconds, *still[half:]], device=device)


def cos_sin(
    rotary: Rotary, positions: torch.Tensor, order: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [1, n, head_dim] at positions [n], for channels in an order of
    half_split_order()."""
    head_dim = len(order)
    # The rotation takes (1, 0) to (cosine, sine).
    ones = torch.zeros((len(positions), 1, head_dim), device=positions.device)
    ones[..., order[: head_dim // 2]] = 1
    cos, sin = rotary.rotate(ones, positions)[:, 0, order].to(dtype).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1)[None], torch.cat((sin, sin), dim=-1)[None]
