"""A model whose linear layers or vocabulary projection have other weights, for drafts."""

from __future__ import annotations

import argparse
import copy

import torch
from two_parts.parts import decode_first, encode

from acceptance.input_moments import InputMoments
from acceptance.model import PROJECTION, Llama
from acceptance.prompts import BOS, cut_prompts
from kvspec_kernels.reference import int4_weights
from sglang_kvspec.adapters.calibration_texts import NUM_TEXTS, SEED, TEXT_LEN

ENCODERS = {
    "nearest": int4_weights.round_to_nearest,
    "half_quadratic": int4_weights.half_quadratic,
}
# How weights are rounded. Compensated ones know inputs of code, or of text that the model writes.
# first_part: 8 of the 12 bits of weights in two parts, not rounded to 4 bits.
KINDS = ("target", "nearest", "half_quadratic", "compensated", "own_text", "first_part")
# How the vocabulary projection is rounded. int8: to 8 bits, with one scale a row.
PROJECTIONS = ("nearest", "compensated", "own_text", "int8")
# Prompts of another seed, whose inputs compensated rounding sees.
CALIBRATION_PROMPTS, CALIBRATION_LEN, CALIBRATION_SEED = 8, 1024, 1
LINEAR = "proj.weight"


def with_weights(model: Llama, kind: str, args: argparse.Namespace) -> Llama:
    """Return the model with other weights of its linear layers."""
    if kind == "target":
        return model
    moments: dict[int, torch.Tensor] = {}
    if kind in ("compensated", "own_text"):
        moments = input_moments(model, args, own_text=kind == "own_text")

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        if kind == "first_part":
            return decode_first(encode(weight.bfloat16()))
        if moments:
            return int4_weights.decode(int4_weights.compensated(weight, moments[id(weight)]))
        return int4_weights.decode(ENCODERS[kind](weight))

    return _replaced(
        model,
        {name: rounded(part) for name, part in model.weights.items() if name.endswith(LINEAR)},
    )


def with_projection(model: Llama, weight: torch.Tensor) -> Llama:
    """Return the model with this vocabulary projection. Its embeddings stay."""
    return _replaced(model, {PROJECTION: weight})


def rounded_projection(model: Llama, kind: str, args: argparse.Namespace) -> torch.Tensor:
    """Return the model's vocabulary projection, rounded as one of PROJECTIONS."""
    weight = model.projection
    if kind == "nearest":
        return int4_weights.decode(int4_weights.round_to_nearest(weight))
    if kind == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round() * scale
    moments = input_moments(model, args, own_text=kind == "own_text")
    return int4_weights.decode(int4_weights.compensated(weight, moments[id(weight)]))


def _replaced(model: Llama, weights: dict[str, torch.Tensor]) -> Llama:
    other = copy.copy(model)
    other.weights = model.weights | weights
    return other


def input_moments(
    model: Llama, args: argparse.Namespace, *, own_text: bool
) -> dict[int, torch.Tensor]:
    """Return the sums of x^T x of each weight over the calibration prompts, or over texts that the
    model writes."""
    if own_text:
        prompts = write_texts(model)
    else:
        prompts, _ = cut_prompts(
            args.model, CALIBRATION_PROMPTS, CALIBRATION_LEN, CALIBRATION_SEED, args.text
        )
    with InputMoments() as moments:
        for prompt in prompts.to(model.device).split(1):
            model.prefill(prompt, 0, all_logits=True)
    return moments.by_weight


@torch.inference_mode()
def write_texts(model: Llama) -> torch.Tensor:
    """Return texts that the model writes at temperature 1, as a server does at its start."""
    chance = torch.Generator().manual_seed(SEED)
    vocab_size = model.weights["embed_tokens.weight"].shape[0]
    texts = torch.full((NUM_TEXTS, TEXT_LEN), BOS)
    texts[:, 1] = torch.randint(vocab_size, (NUM_TEXTS,), generator=chance)
    cache, logits, _ = model.prefill(texts[:, :2].to(model.device), TEXT_LEN)
    for place in range(2, TEXT_LEN):
        texts[:, place] = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=chance)[:, 0]
        logits, _ = model.decode(texts[:, place].to(model.device), place, cache)
    return texts
