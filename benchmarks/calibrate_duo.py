"""Calibrate the scorer `duo`: how much each KV head needs tokens far away.

Prompts end with a passage that they already hold, so that heads which retrieve show themselves. For
the queries of that passage, the output of each head is computed from all tokens, and again from
the first and the newest tokens alone. The number of a KV head is the squared error, relative to
the squared output: 0 for a head that needs no other tokens.

usage: python benchmarks/calibrate_duo.py [MODEL] --out duo.json
           [--length 8192] [--prompts 8] [--sinks 16] [--recent 256]

The file has {"retrieval": [[number for each KV head] for each layer]}. DuoAttention trains gates by
the same error (arXiv 2410.10819, section 2.3); here each head is measured by itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from acceptance.model import Llama
from acceptance.prompts import TEXTS, cut_prompts
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
# Queries whose attention is computed at once.
BLOCK = 256
# A repeated passage has this share of a prompt.
REPEATED = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    default_model = ROOT.parent / "shared" / "models" / "eval-31m"
    add("model", type=Path, nargs="?", default=default_model, help="folder of a model")
    add("--prompts", type=int, default=8)
    add("--length", type=int, default=8192, help="tokens per prompt")
    add("--sinks", type=int, default=16, help="first tokens that all heads read")
    add("--recent", type=int, default=256, help="newest tokens that all heads read")
    add("--text", choices=TEXTS, default="code", help="text of the prompts")
    add("--seed", type=int, default=1)
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.length < REPEATED * REPEATED or args.sinks < 1 or args.recent < 1:
        parser.error(
            f"--length must be at least {REPEATED * REPEATED}, --sinks and --recent at least 1"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Llama(args.model, device)
    prompts, _ = cut_prompts(args.model, args.prompts, args.length, args.seed, args.text)
    errors = retrieval(model, with_repeats(prompts), args.sinks, args.recent)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"retrieval": errors.tolist()}) + "\n", encoding="utf-8")
    for number, layer in enumerate(errors.tolist()):
        Console().print(f"layer {number}: {' '.join(f'{error:.3f}' for error in layer)}")


def with_repeats(prompts: torch.Tensor) -> torch.Tensor:
    """Return prompts [count, tokens] whose end repeats a passage from a quarter of their length."""
    length = prompts.shape[1]
    begin, size = length // 4, length // REPEATED
    return torch.cat((prompts[:, : length - size], prompts[:, begin : begin + size]), dim=1)


def retrieval(model: Llama, prompts: torch.Tensor, sinks: int, recent: int) -> torch.Tensor:
    """Return the error of each KV head [num_layers, num_kv_heads] float64 over the last
    1 / REPEATED of the prompts [count, tokens], see the module's docstring."""
    shape = model.shape
    # Squared errors, and squared outputs.
    sums = torch.zeros(2, shape.num_layers, shape.num_kv_heads, dtype=torch.float64)
    sums = sums.to(model.device)

    def observe(
        layer: int, hidden: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        first = k.shape[2] - k.shape[2] // REPEATED
        for start in range(first, k.shape[2], BLOCK):
            sums[:, layer] += squares(
                q[0, :, start : start + BLOCK], k[0], v[0], start, sinks, recent
            )

    for prompt in track(prompts.to(model.device).split(1), "prompts"):
        model.prefill(prompt, 0, observe=observe)
    errors, outputs = sums
    return (errors / outputs).cpu()


def squares(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, sinks: int, recent: int
) -> torch.Tensor:
    """Return for each KV head the squared error of the output from the first and the newest tokens
    alone, and the squared output from all tokens, [2, num_kv_heads].

    q: [num_heads, n, head_dim] of tokens from position `start` on; k, v: [num_kv_heads, tokens,
    head_dim].
    """
    end = start + q.shape[1]
    places = torch.arange(end, device=q.device)
    own = torch.arange(start, end, device=q.device)[:, None]
    grouped = q.unflatten(0, (len(k), -1))
    logits = grouped @ k[:, None, :end].transpose(2, 3) * q.shape[-1] ** -0.5
    logits.masked_fill_(places > own, float("-inf"))
    far = (places >= sinks) & (places <= own - recent)
    values = v[:, None, :end]
    whole = logits.softmax(-1) @ values
    near = logits.masked_fill(far, float("-inf")).softmax(-1) @ values
    return torch.stack([part.double().square().sum((1, 2, 3)) for part in (near - whole, whole)])


if __name__ == "__main__":
    main()
