"""A plain torch Llama over a batch of equally long prompts, for acceptance measurements only."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

# Cache of a batch: one (k, v) pair per layer, each [batch, num_kv_heads, tokens, head_dim] fp32.
# Heads come before tokens, so that a decode step reads the keys of each head contiguously.
LayerCache = list[tuple[torch.Tensor, torch.Tensor]]
# Result of prefill(): the cache, logits of the last position, and queries of the last positions by
# layer.
Prefilled = tuple[LayerCache, torch.Tensor, list[torch.Tensor]]
# Called in each layer of a forward, before attention, with the layer's number; the normed input of
# its projections [batch, n, hidden_size]; queries [batch, num_heads, n, head_dim]; K and V of all
# tokens so far [batch, num_kv_heads, tokens, head_dim].
Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
# Queries of a prompt's last tokens, by which draft views choose pages for the first round.
PROMPT_QUERIES = 32
# Name of a vocabulary projection that is not the embeddings.
PROJECTION = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The fields of config.json that the forward pass needs."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float

    @classmethod
    def from_config(cls, config: dict) -> LlamaShape:
        if config["model_type"] != "llama" or not config.get("tie_word_embeddings"):
            raise ValueError(
                "the acceptance benchmark needs a Llama model with tied embeddings, got "
                f"model_type={config['model_type']!r}, "
                f"tie_word_embeddings={config.get('tie_word_embeddings')!r}"
            )
        heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim", config["hidden_size"] // heads),
            rms_eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
        )


class Llama:
    """Weights in fp32, and forwards of prompts and of single tokens."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.shape = LlamaShape.from_config(json.loads((folder / "config.json").read_text()))
        self.device = device
        state = load_file(str(folder / "model.safetensors"))
        self.weights = {
            name.removeprefix("model."): w.to(device, torch.float32) for name, w in state.items()
        }

    @property
    def projection(self) -> torch.Tensor:
        """Return the vocabulary projection. A model for drafts may have one of its own."""
        return self.weights.get(PROJECTION, self.weights["embed_tokens.weight"])

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        spare: int,
        *,
        all_logits: bool = False,
        observe: Observer | None = None,
    ) -> Prefilled:
        """Run prompts [batch, T] int64. Return the cache, with room for `spare` more tokens after
        the first T, the logits of the last position [batch, vocab], and the queries of the last
        PROMPT_QUERIES positions by layer [batch, num_heads, PROMPT_QUERIES, head_dim].

        all_logits: compute the logits of all positions, for InputMoments. observe: shown every
        layer.
        """
        length = tokens.shape[1]
        x = self.weights["embed_tokens.weight"][tokens]
        cos, sin = self._rope(torch.arange(length, device=self.device))
        cache: LayerCache = []
        queries = []
        for layer in range(self.shape.num_layers):
            hidden = self._normed(layer, x)
            q, k, v = self._qkv(layer, hidden, cos, sin)
            queries.append(q[:, :, -PROMPT_QUERIES:].clone())
            if observe is not None:
                observe(layer, hidden, q, k, v)
            group = self.shape.num_heads // self.shape.num_kv_heads
            out = F.scaled_dot_product_attention(
                q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
            )
            x = self._after_attention(layer, x, out)
            cache.append((F.pad(k, (0, 0, 0, spare)), F.pad(v, (0, 0, 0, spare))))
        logits = self._logits(x if all_logits else x[:, -1:])
        return cache, logits[:, -1], queries

    @torch.inference_mode()
    def repeat(self, tokens: torch.Tensor, past: LayerCache, observe: Observer) -> None:
        """Run tokens [1, n] at the positions behind a prompt, whose K and V are `past`, and show
        every layer. Keeps nothing."""
        num_past, num_new = past[0][0].shape[2], tokens.shape[1]
        x = self.weights["embed_tokens.weight"][tokens]
        cos, sin = self._rope(num_past + torch.arange(num_new, device=self.device))
        size = (num_new, num_past + num_new)
        visible = torch.ones(size, dtype=torch.bool, device=self.device).tril(num_past)
        group = self.shape.num_heads // self.shape.num_kv_heads
        for layer, (k_past, v_past) in enumerate(past):
            hidden = self._normed(layer, x)
            q, k, v = self._qkv(layer, hidden, cos, sin)
            k, v = torch.cat((k_past, k), dim=2), torch.cat((v_past, v), dim=2)
            observe(layer, hidden, q, k, v)
            out = F.scaled_dot_product_attention(
                q,
                k.repeat_interleave(group, 1),
                v.repeat_interleave(group, 1),
                attn_mask=visible,
            )
            x = self._after_attention(layer, x, out)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return x [n, heads, head_dim] at positions [n], see scorers.base.Rotary."""
        cos, sin = (part[:, None] for part in self._rope(positions))
        return turned(x, cos, sin)

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return what rotate() was given."""
        cos, sin = (part[:, None] for part in self._rope(positions))
        return turned(x, cos, -sin)

    @torch.inference_mode()
    def decode(
        self, tokens: torch.Tensor, position: int, cache: LayerCache
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run one token per prompt, tokens [batch] at `position`. Write their K and V to `cache`.

        Return logits [batch, vocab] and the queries of each layer [batch, num_heads, head_dim].
        """
        x = self.weights["embed_tokens.weight"][tokens][:, None]
        cos, sin = self._rope(torch.tensor([position], device=self.device))
        queries = []
        for layer, (k_cache, v_cache) in enumerate(cache):
            q, k, v = self._qkv(layer, self._normed(layer, x), cos, sin)
            k_cache[:, :, position] = k[:, :, 0]
            v_cache[:, :, position] = v[:, :, 0]
            length = position + 1
            out = attend(q, k_cache[:, :, :length], v_cache[:, :, :length])
            x = self._after_attention(layer, x, out)
            queries.append(q[:, :, 0])
        return self._logits(x[:, 0]), queries

    @torch.inference_mode()
    def decode_masked(
        self,
        tokens: torch.Tensor,
        begins: torch.Tensor,
        rows: torch.Tensor,
        cache: LayerCache,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """Run tokens [m, n] of the prompts `rows` [m] of a batch, at begins [m] and the positions
        behind it. Write their K and V to `cache`. Return logits [m, n, vocab].

        visible: tokens of `cache` that each KV head attends to, bool [num_layers, batch,
        num_kv_heads, tokens], with at least one for each position. A position attends to none
        behind it.
        """
        num_new = tokens.shape[1]
        x = self.weights["embed_tokens.weight"][tokens]
        positions = begins[:, None] + torch.arange(num_new, device=self.device)
        cos, sin = (part[:, None] for part in self._rope(positions))
        group = self.shape.num_heads // self.shape.num_kv_heads
        # Read once: a GPU would be waited for in every layer.
        end = int(positions.max()) + 1
        for layer, (k_cache, v_cache) in enumerate(cache):
            q, k, v = self._qkv(layer, self._normed(layer, x), cos, sin)
            k_cache[rows[:, None], :, positions] = k.transpose(1, 2)
            v_cache[rows[:, None], :, positions] = v.transpose(1, 2)
            k, v, places = _only_visible(k_cache, v_cache, rows, visible[layer, rows, :, :end])
            hidden = places[:, :, None] > positions[:, None, :, None]
            # Rows of a KV head: its query heads, of n positions each.
            grouped = q.unflatten(1, (-1, group)).flatten(2, 3)
            scores = grouped @ k.transpose(2, 3) * self.shape.head_dim**-0.5
            by_head = scores.unflatten(2, (group, -1))
            by_head.masked_fill_(hidden[:, :, None], float("-inf"))
            out = (scores.softmax(-1) @ v).unflatten(2, (group, -1)).flatten(1, 2)
            x = self._after_attention(layer, x, out)
        return self._logits(x)

    @torch.inference_mode()
    def decode_behind(
        self,
        tokens: torch.Tensor,
        begins: torch.Tensor,
        step: int,
        past: LayerCache,
        own: LayerCache,
    ) -> torch.Tensor:
        """Run one token of each of several continuations of a prompt, tokens [n] at begins + step.
        Return logits [n, vocab].

        begins [n]: where each continuation begins. past: by layer, K and V of the prompt
        [num_kv_heads, tokens, head_dim], of which continuation i reads those before begins[i]. own:
        K and V of each continuation's tokens so far [n, num_kv_heads, steps, head_dim], to which
        those of these tokens are written.
        """
        x = self.weights["embed_tokens.weight"][tokens][:, None]
        cos, sin = (part[:, None, None] for part in self._rope(begins + step))
        group = self.shape.num_heads // self.shape.num_kv_heads
        num_past = int(begins.max())
        hidden = torch.arange(num_past, device=self.device) >= begins[:, None]
        for layer, ((k_past, v_past), (k_own, v_own)) in enumerate(zip(past, own, strict=True)):
            q, k, v = self._qkv(layer, self._normed(layer, x), cos, sin)
            k_own[:, :, step] = k[:, :, 0]
            v_own[:, :, step] = v[:, :, 0]
            grouped = q.unflatten(1, (-1, group))[:, :, :, 0] * self.shape.head_dim**-0.5
            # Rows of all continuations read the keys of the prompt at once.
            rows = grouped.transpose(0, 1).flatten(1, 2)
            before = rows @ k_past[:, :num_past].transpose(1, 2)
            before = before.unflatten(1, (-1, group)).transpose(0, 1)
            before.masked_fill_(hidden[:, None, None], float("-inf"))
            behind = grouped @ k_own[:, :, : step + 1].transpose(2, 3)
            weights = torch.cat((before, behind), dim=-1).softmax(-1)
            of_past = weights[..., :num_past].transpose(0, 1).flatten(1, 2) @ v_past[:, :num_past]
            out = of_past.unflatten(1, (-1, group)).transpose(0, 1)
            out = out + weights[..., num_past:] @ v_own[:, :, : step + 1]
            x = self._after_attention(layer, x, out.flatten(1, 2)[:, :, None])
        return self._logits(x[:, 0])

    def _rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.shape.head_dim // 2
        exponent = torch.arange(half, device=self.device, dtype=torch.float32) / half
        angle = positions.float()[..., None] * (1.0 / self.shape.rope_theta**exponent)
        return angle.cos(), angle.sin()

    def _normed(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Return the input of a layer's projections to q, k and v."""
        weight = self.weights[f"layers.{layer}.input_layernorm.weight"]
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.rms_eps)

    def _qkv(
        self, layer: int, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [batch, num_heads, T, head_dim], k and v [batch, num_kv_heads, T, head_dim].

        h: see _normed(). Rotary positions are applied to the (first, second) half pairs of q and k.
        """

        def heads(name: str) -> torch.Tensor:
            projected = F.linear(h, self.weights[f"layers.{layer}.self_attn.{name}.weight"])
            return projected.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

        q, k = (turned(heads(name), cos, sin) for name in ("q_proj", "k_proj"))
        return q, k, heads("v_proj")

    def _after_attention(self, layer: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the output projection and the MLP.

        out: attention outputs [batch, heads, T, dim].
        """
        prefix = f"layers.{layer}."
        w = self.weights
        x = x + F.linear(out.transpose(1, 2).flatten(2), w[prefix + "self_attn.o_proj.weight"])
        h = F.rms_norm(
            x, (x.shape[-1],), w[prefix + "post_attention_layernorm.weight"], self.shape.rms_eps
        )
        gate = F.silu(F.linear(h, w[prefix + "mlp.gate_proj.weight"]))
        up = F.linear(h, w[prefix + "mlp.up_proj.weight"])
        return x + F.linear(gate * up, w[prefix + "mlp.down_proj.weight"])

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, (x.shape[-1],), self.weights["norm.weight"], self.shape.rms_eps)
        return F.linear(h, self.projection)


def _only_visible(
    k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the keys and values that each KV head of some prompts attends to [m, num_kv_heads, n,
    head_dim], and their tokens [m, num_kv_heads, n]. Heads with fewer are padded with a token
    behind all others.

    k, v: contiguous [batch, num_kv_heads, tokens, head_dim]. rows: the prompts [m]. visible: of
    their first tokens, bool [m, num_kv_heads, tokens or fewer].
    """
    num_tokens, counts = k.shape[2], visible.sum(-1)
    before = counts.flatten().cumsum(0).view_as(counts) - counts
    row, head, token = visible.nonzero(as_tuple=True)
    rank = torch.arange(len(token), device=k.device) - before[row, head]
    places = torch.full((*counts.shape, int(counts.max())), num_tokens, device=k.device)
    places[row, head, rank] = token
    first = (rows[:, None] * k.shape[1] + torch.arange(k.shape[1], device=k.device)) * num_tokens
    # Padding reads any token, as no position attends to it.
    index = first[..., None] + places.clamp_max(num_tokens - 1)
    k, v = (part.view(-1, part.shape[-1])[index] for part in (k, v))
    return k, v, places


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of the first and the second half of x's last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute grouped-query attention without repeating K and V.

    q [batch, num_heads, T, head_dim]; k, v [batch, num_kv_heads, S, head_dim]; mask [T, S] bool,
    True where a query may attend (None: everywhere). Return [batch, num_heads, T, head_dim].
    """
    batch, num_heads, length, dim = q.shape
    kv_heads = k.shape[1]
    rows = q.reshape(batch, kv_heads, num_heads // kv_heads * length, dim)
    scores = rows @ k.transpose(2, 3) * dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask.repeat(num_heads // kv_heads, 1), float("-inf"))
    return (scores.softmax(-1) @ v).reshape(batch, num_heads, length, dim)
