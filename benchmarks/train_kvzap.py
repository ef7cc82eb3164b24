"""Train the surrogate that the scorer `kvzap` reads: from hidden states to logarithms of scores.

The teacher, KVzip, scores every token of some prompts. For each layer, ridge regression in closed
form gives the linear map from the input of the attention block to the logarithm of the score of
each KV head. Prompts that the map has not seen tell how much of the logarithms it explains (R²).

usage: python benchmarks/train_kvzap.py [MODEL] --out kvzap.safetensors
           [--length 8192] [--prompts 24] [--held-out 8] [--penalty 1e-4]

The file has `layers.{i}.weight` [num_kv_heads, hidden_size] and `layers.{i}.bias` [num_kv_heads] in
float32. Prompts are cut from the sources that bench_compressors.py also takes: with another --seed
they are other windows, which may share text.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from acceptance.model import Llama
from acceptance.prompts import TEXTS, cut_prompts
from acceptance.ridge import Explained, Linear, RidgeSums
from acceptance.scored import score_prompts
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file

from sglang_kvspec.core.compressor import parse_compressor
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.scorers.base import Scorer
from sglang_kvspec.scorers.making import make_scorer

ROOT = Path(__file__).resolve().parents[1]
# Least score that counts: logarithms of vanishing attention would outweigh all others.
LEAST_SCORE = 1e-6

# Samples of a prompt, by layer: inputs [tokens, hidden_size], and logarithms of scores [tokens,
# num_kv_heads].
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    default_model = ROOT.parent / "shared" / "models" / "eval-31m"
    add("model", type=Path, nargs="?", default=default_model, help="folder of a model")
    add("--prompts", type=int, default=24, help="prompts to train on")
    add("--held-out", type=int, default=8, help="prompts to tell R² by")
    add("--length", type=int, default=8192, help="tokens per prompt")
    add("--text", choices=TEXTS, default="code", help="text of the prompts")
    add("--seed", type=int, default=1)
    add("--penalty", type=float, default=1e-4, help="of squared weights, see acceptance/ridge.py")
    add("--teacher", default="kvzip", help="scorer whose scores are learned")
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.prompts < 1 or args.held_out < 1:
        parser.error("--prompts and --held-out must be 1 or more")
    try:
        teacher = make_scorer(parse_compressor(args.teacher))
    except ConfigError as error:
        parser.error(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Llama(args.model, device)
    count = args.prompts + args.held_out
    prompts, _ = cut_prompts(args.model, count, args.length, args.seed, args.text)
    layers = train(model, prompts[: args.prompts], teacher, args.penalty)
    explained = explain(model, prompts[args.prompts :], teacher, layers)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(layers), args.out)
    by_layer = " ".join(f"{share:.2f}" for share in explained.mean(1).tolist())
    Console().print(f"R² on {args.held_out} held-out prompts: {explained.mean():.3f}")
    Console().print(f"by layer: {by_layer}")


def train(model: Llama, prompts: torch.Tensor, teacher: Scorer, penalty: float) -> list[Linear]:
    """Return the surrogate of each layer, trained on prompts [count, tokens]."""
    sums: list[RidgeSums] = []
    for pairs in pairs_of(model, prompts, teacher, "training"):
        sums = sums or [RidgeSums(x.shape[1], y.shape[1], x.device) for x, y in pairs]
        for layer, (x, y) in zip(sums, pairs, strict=True):
            layer.add(x, y)
    return [each.solve(penalty) for each in sums]


def explain(
    model: Llama, prompts: torch.Tensor, teacher: Scorer, layers: list[Linear]
) -> torch.Tensor:
    """Return R² of the surrogates on prompts, [num_layers, num_kv_heads]."""
    explained = [Explained(len(each.bias), each.bias.device) for each in layers]
    for pairs in pairs_of(model, prompts, teacher, "held-out prompts"):
        for share, layer, (x, y) in zip(explained, layers, pairs, strict=True):
            share.add(layer(x), y)
    return torch.stack([each.shares() for each in explained])


def pairs_of(
    model: Llama, prompts: torch.Tensor, teacher: Scorer, description: str
) -> Iterator[Pairs]:
    """Yield for each prompt what a surrogate reads and what it should say."""
    for prompt in track(prompts.split(1), description):
        inputs: list[torch.Tensor] = []

        def keep(layer: int, hidden: torch.Tensor, *_: torch.Tensor) -> None:
            inputs.append(hidden[0])  # noqa: B023  # called before the next prompt

        model.prefill(prompt.to(model.device), 0, observe=keep)
        scores = score_prompts(model, prompt, {"teacher": teacher})["teacher"][0].scores
        # Tokens that are read in any case have no score to learn.
        learned = scores.isfinite().all(0).all(0)
        logs = scores.clamp_min(LEAST_SCORE).log()
        yield [(x[learned], y[:, learned].T) for x, y in zip(inputs, logs, strict=True)]


def tensors_of(layers: list[Linear]) -> dict[str, torch.Tensor]:
    """Return the tensors of a surrogate's file."""
    tensors = {}
    for number, layer in enumerate(layers):
        tensors[f"layers.{number}.weight"] = layer.weight.cpu()
        tensors[f"layers.{number}.bias"] = layer.bias.cpu()
    return tensors


if __name__ == "__main__":
    main()
