"""A checkpoint in GPTQ format of a small model, rounded to the nearest codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CODES_IN_WORD = 8


def write_gptq(model: Path, folder: Path, group: int = 64, **changes: Any) -> None:
    """Write the linear layers of a model in 4 bits, and the rest of its tensors as they are.

    model: folder with a single model.safetensors. folder: must not exist. group: inputs that share
    a scale, which divide the inputs of every layer. changes: of quantization_config.
    """
    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            tensors |= {f"{layer}.{part}": t for part, t in in_gptq(tensor.float(), group).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False}
    config["quantization_config"] = quantization | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def in_gptq(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Return qweight, qzeros and scales of a weight, fp32 [N, K], in the first version of the
    format."""
    groups = weight.view(len(weight), -1, group)
    # Zero is among the values, so that its code is one from 1 to 15, as stored zeros are one less.
    least, most = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((most - least) / 14).clamp_min(1e-8).half().float()
    zero = 1 + (-least / scale).round().clamp(0, 14)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return {
        "qweight": _words(codes.flatten(1).t().reshape(-1, CODES_IN_WORD, len(weight)), 1),
        "qzeros": _words((zero.t() - 1).reshape(zero.shape[1], -1, CODES_IN_WORD), 2),
        "scales": scale.t().half().contiguous(),
    }


def _words(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Return int32 words of codes, of which `dim` holds 8, the first in the lowest bits."""
    shifts = 4 * torch.arange(CODES_IN_WORD)
    shape = [1] * codes.ndim
    shape[dim] = CODES_IN_WORD
    total = (codes.long() << shifts.view(shape)).sum(dim)
    return torch.where(total < 2**31, total, total - 2**32).to(torch.int32).contiguous()
