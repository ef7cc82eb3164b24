"""Weights in 4 bits of a checkpoint in GPTQ or AWQ format, for drafts of a model in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvspec_kernels.reference import int4_checkpoints
from kvspec_kernels.reference.int4_weights import Int4Weight
from sglang_kvspec.core.errors import ConfigError

# Layers that SGLang fuses, and their parts in a checkpoint.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
FLAG = "--kvspec-draft-weights"


class WeightCheckpoint:
    """Weights of a folder with config.json and safetensors."""

    def __init__(self, folder: str) -> None:
        """Reads the configuration and names only. Raises ConfigError for a folder that cannot be
        read, and for formats other than GPTQ and AWQ in 4 bits."""
        self.folder = Path(folder)
        self._decode = _decoder(self.folder, self._read_config())
        # File of each tensor.
        self._files: dict[str, Path] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    self._files |= dict.fromkeys(file.keys(), path)
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{FLAG} {folder}: {path.name} cannot be read: {error}"
                ) from error
        if not self._files:
            raise ConfigError(f"{FLAG} {folder} has no *.safetensors")

    def read(self, name: str, device: torch.device) -> Int4Weight:
        """Return the weight of a linear layer of the model, of all ranks together. Raises
        ConfigError for a layer that the checkpoint lacks or has in another form."""
        before, _, last = name.rpartition(".")
        parts = [f"{before}.{part}" if before else part for part in FUSED.get(last, (last,))]
        try:
            weights = [self._decode(self._tensors(part, device)) for part in parts]
        except ValueError as error:
            raise ConfigError(f"{FLAG} {self.folder}: {name} has {error}") from error
        return int4_checkpoints.stacked(weights)

    def _tensors(self, name: str, device: torch.device) -> dict[str, torch.Tensor]:
        tensors = {}
        for part in ("qweight", "qzeros", "scales"):
            path = self._files.get(f"{name}.{part}")
            if path is None:
                raise ConfigError(
                    f"{FLAG} {self.folder} has no {name}.{part} (allowed: a checkpoint in which "
                    "all linear layers of the model are in 4 bits)"
                )
            with safe_open(path, framework="pt", device=str(device)) as file:
                tensors[part] = file.get_tensor(f"{name}.{part}")
        return tensors

    def _read_config(self) -> dict[str, Any]:
        try:
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{FLAG} {self.folder}: config.json cannot be read: {error.strerror} (allowed: the "
                "folder of a checkpoint, auto, int4 or target)"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{FLAG} {self.folder}: config.json is not JSON: {error}") from error
        return dict(config.get("quantization_config") or {})


def _decoder(
    folder: Path, config: dict[str, Any]
) -> Callable[[dict[str, torch.Tensor]], Int4Weight]:
    """Return how tensors of this quantization_config become a weight. Raises ConfigError for one
    that is not supported."""
    method, bits = config.get("quant_method"), config.get("bits", config.get("w_bit"))
    if method not in ("gptq", "awq") or bits != 4:
        raise ConfigError(
            f"{FLAG} {folder} has quant_method {method} with {bits} bits (allowed: gptq or awq "
            "with 4 bits)"
        )
    if method == "gptq":
        if config.get("desc_act"):
            raise ConfigError(f"{FLAG} {folder} has desc_act true (allowed: false)")
        stores = config.get("checkpoint_format", "gptq")
        if stores not in ("gptq", "gptq_v2"):
            raise ConfigError(
                f"{FLAG} {folder} has checkpoint_format {stores} (allowed: gptq, gptq_v2)"
            )
        return lambda t: int4_checkpoints.from_gptq(**t, zero_is_less=stores == "gptq")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ConfigError(f"{FLAG} {folder} has version {version} (allowed: gemm)")
    return lambda t: int4_checkpoints.from_awq(**t)
