"""Choice of the TargetAttention of a server on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_kvspec.core.config import KVSpecConfig, Target
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.core.seams import TARGET_ATTENTIONS

if TYPE_CHECKING:
    from sglang_kvspec.runtime.target_attention import TargetAttention

# Name of the deterministic attention of each target.
DETERMINISTIC: Mapping[Target, str] = {"exact": "deterministic", "int8": "int8_deterministic"}


def target_attention_name(config: KVSpecConfig, *, deterministic: bool) -> str:
    """Return the name in effect. deterministic: --enable-deterministic-inference is on."""
    if config.target_attention is not None:
        return config.target_attention
    return DETERMINISTIC[config.target] if deterministic else config.target


def load_target_attention(config: KVSpecConfig, *, deterministic: bool) -> type[TargetAttention]:
    """Import the class in effect.

    Raises ConfigError as Registry.load, and UnsupportedError for a class of another target than
    --kvspec-target, or one that is not deterministic where `deterministic` asks for it.
    """
    name = target_attention_name(config, deterministic=deterministic)
    found: type[TargetAttention] = TARGET_ATTENTIONS.load(name)
    if found.target != config.target:
        raise UnsupportedError(
            f"{TARGET_ATTENTIONS.flag} {name} cannot be combined with --kvspec-target "
            f"{config.target} (allowed: {found.target})"
        )
    if deterministic and not found.is_deterministic:
        raise UnsupportedError(
            f"{TARGET_ATTENTIONS.flag} {name} cannot be combined with "
            f"--enable-deterministic-inference (allowed: {DETERMINISTIC[config.target]}): with "
            f"{name}, results "
            "depend on the other requests of the batch"
        )
    return found
