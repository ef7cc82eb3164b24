"""Texts that a model writes itself, for its inputs to be measured on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sglang_kvspec.adapters.compat.forward import ForwardContext, forward_context
from sglang_kvspec.adapters.compat.parallel_state import graph_capture
from sglang_kvspec.adapters.decode_batch import decode_batch, run_model
from sglang_kvspec.adapters.forward_capture import ForwardCapture
from sglang_kvspec.adapters.self_calibration import TextAttention
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.runtime.ranks import Ranks

NUM_TEXTS, TEXT_LEN = 16, 512
SEED = 0
# The first forward compiles kernels, and the second one runs like those that follow.
WARM_UPS = 2

# Step of all texts: takes the tokens at a place, int64 [count], and the place. Returns logits
# [count, vocab], which the next step may overwrite.
Step = Callable[[torch.Tensor, int], torch.Tensor]

# Graphs with collectives, which keep their memory until the server ends: SGLang's custom all-reduce
# has mapped buffers of each into the other ranks, and never unmaps them. These are activations of
# one step, tens of megabytes.
_mapped: list[torch.cuda.CUDAGraph] = []


class GrowingTexts:
    """KV of several texts, each of which attends to itself in steps of one token."""

    def __init__(self, num_texts: int, length: int) -> None:
        self._num_texts, self._length = num_texts, length
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Tokens of each text before this step.
        self.num_past = 0

    def attend(self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend with one token of each text."""
        if layer.layer_id not in self._caches:
            shape = (self._num_texts, k.shape[1], self._length, k.shape[2])
            self._caches[layer.layer_id] = (k.new_empty(shape), k.new_empty(shape))
        past = self._caches[layer.layer_id]
        for cache, part in zip(past, (k, v), strict=True):
            cache[:, :, self.num_past] = part
        keys, values = (cache[:, :, : self.num_past + 1] for cache in past)
        return _attend_with_one_token(layer, q, keys, values)


class StaticTexts:
    """StaticRows of a step that writes one token of each text, with the texts' KV. input_ids,
    positions: int64 [num_texts].

    A step advances its own position, so the next replay of its graph is the next step. Attention
    goes over the whole length with a mask: its shapes must not change. At 512 tokens that costs
    little beside the weights.
    """

    def __init__(self, num_texts: int, length: int, device: torch.device) -> None:
        self._num_texts, self._length, self.device = num_texts, length, device
        self.input_ids, self.positions = torch.zeros(
            (2, num_texts), dtype=torch.int64, device=device
        )
        self._places = torch.arange(length, device=device)
        self._is_later = torch.zeros(length, dtype=torch.bool, device=device)
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        """Begin all texts again. KV of earlier steps stays, and is masked."""
        self.input_ids.zero_()
        self.positions.zero_()

    def begin_step(self, num_tokens: int) -> None:
        torch.gt(self._places, self.positions[0], out=self._is_later)

    def end_step(self, logits: torch.Tensor) -> None:
        self.positions.add_(1)

    def attend(self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend with one token of each text. A layer's first call, in a warm-up, allocates."""
        if layer.layer_id not in self._caches:
            shape = (self._num_texts, k.shape[1], self._length, k.shape[2])
            # Masked values have weight 0, and must be finite.
            self._caches[layer.layer_id] = (k.new_zeros(shape), k.new_zeros(shape))
        keys, values = self._caches[layer.layer_id]
        for cache, part in ((keys, k), (values, v)):
            cache.index_copy_(2, self.positions[:1], part[:, :, None])
        return _attend_with_one_token(layer, q, keys, values, self._is_later)


def _attend_with_one_token(
    layer: Any,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    is_masked: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of q [texts, heads, head size] over keys and values [texts, KV heads,
    length, head size]. is_masked: bool [length], places that are not read."""
    # Not scaled_dot_product_attention(): on a GPU it may prepare a kernel for every new length,
    # which took 50 ms each.
    grouped = q.view(len(q), keys.shape[1], -1, keys.shape[3])
    scores = (grouped @ keys.transpose(2, 3)).float() * layer.scaling
    if is_masked is not None:
        scores.masked_fill_(is_masked, float("-inf"))
    return (scores.softmax(-1).to(values.dtype) @ values).reshape(q.shape)


@torch.inference_mode()
def write_texts(runner: Any, ranks: Ranks, count: int, length: int) -> torch.Tensor:
    """Return texts [count, length] int64 that the model writes at temperature 1, behind its first
    token and a random one. Rank 0 chooses the tokens of all ranks. Raises UnsupportedError on a GPU
    for a model whose forward cannot be captured."""
    device = torch.device(runner.device)
    # On the device: a CPU takes longer for a draw from a large vocabulary than a GPU for a step.
    chance = torch.Generator(device).manual_seed(SEED)
    texts = torch.zeros(count, length, dtype=torch.int64, device=device)
    size = runner.model_config.vocab_size
    texts[:, :2] = torch.randint(size, (count, 2), generator=chance, device=device)
    first = _first_token(runner.model_config.hf_config)
    if first is not None:
        texts[:, 0] = first
    make_step = _captured_step if device.type == "cuda" else _eager_step
    _continue(texts, make_step(runner, ranks, count, length), ranks, chance)
    if device.type == "cuda":
        # Give back the memory of the graph and of the texts' KV, which other streams cannot use.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return texts


def _continue(texts: torch.Tensor, step: Step, ranks: Ranks, chance: torch.Generator) -> None:
    """Replace all tokens of texts [count, length] behind the first two, in place."""
    for place in range(texts.shape[1] - 1):
        logits = step(texts[:, place], place)
        if place:
            texts[:, place + 1] = _of_rank_0(ranks, _draw(logits, chance))


def _eager_step(runner: Any, ranks: Ranks, count: int, length: int) -> Step:
    """Return a step that launches the model's forward. Attention reads written places only."""
    written = GrowingTexts(count, length)
    context = ForwardContext(attn_backend=TextAttention(written.attend))

    def step(ids: torch.Tensor, place: int) -> torch.Tensor:
        written.num_past = place
        with forward_context(context):
            return run_model(runner, decode_batch(runner, ids, torch.full_like(ids, place)))

    return step


def _captured_step(runner: Any, ranks: Ranks, count: int, length: int) -> Step:
    """Return a step that replays a CUDA graph of the model's forward: a GPU waits for the launches
    of an eager one most of the time. Steps must be taken in order, from place 0."""
    rows = StaticTexts(count, length, torch.device(runner.device))
    forward = ForwardCapture(runner, count, TextAttention(rows.attend))
    try:
        with graph_capture() as context:
            graph = forward.capture(rows, count, context.stream, WARM_UPS)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Drafts need such a capture too, so an eager fallback would not help.
        model = type(runner.model).__name__
        raise UnsupportedError(
            f"--kvspec-draft-weights int4 cannot serve {model}, whose forward cannot be captured "
            f"in a CUDA graph: {error} (allowed: a model that can be captured)"
        ) from error
    if ranks.size > 1:
        _mapped.append(graph)
    rows.clear()

    def step(ids: torch.Tensor, place: int) -> torch.Tensor:
        rows.input_ids.copy_(ids)
        graph.replay()
        assert forward.logits is not None
        return forward.logits

    return step


def _draw(logits: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Return tokens int64 [count], drawn at temperature 1. The draws are torch.multinomial()'s,
    which may wait for the device to check its arguments."""
    probs = logits.float().softmax(-1)
    return (probs / torch.empty_like(probs).exponential_(generator=chance)).argmax(-1)


def _of_rank_0(ranks: Ranks, mine: torch.Tensor) -> torch.Tensor:
    """Return rank 0's tokens. On a GPU the CPU does not wait for them."""
    if mine.is_cuda:
        return ranks.tensor(mine)
    return torch.tensor(ranks.numbers(mine.tolist(), "texts of calibration"))


def _first_token(config: Mapping[str, Any] | Any) -> int | None:
    """Return the token that begins a text, None for a model without one."""
    found = getattr(config, "bos_token_id", None)
    return found if isinstance(found, int) else None
