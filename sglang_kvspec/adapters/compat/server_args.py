"""Choices of flags, to which KVSpec adds its backends."""

from __future__ import annotations

from sglang.srt.server_args import (
    DISAGG_TRANSFER_BACKEND_CHOICES,
    add_attention_backend_choices,
    add_deterministic_attention_backend_choices,
    add_disagg_transfer_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)

__all__ = [
    "DISAGG_TRANSFER_BACKEND_CHOICES",
    "add_attention_backend_choices",
    "add_deterministic_attention_backend_choices",
    "add_disagg_transfer_backend_choices",
    "add_radix_supported_deterministic_attention_backend_choices",
]
