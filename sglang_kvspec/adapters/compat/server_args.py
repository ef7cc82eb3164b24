"""The parser of the command line, and choices of flags, to which KVSpec adds its backends."""

from __future__ import annotations

from sglang.srt.server_args import (
    DISAGG_TRANSFER_BACKEND_CHOICES,
    add_attention_backend_choices,
    add_deterministic_attention_backend_choices,
    add_disagg_transfer_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
    prepare_server_args,
)

__all__ = [
    "DISAGG_TRANSFER_BACKEND_CHOICES",
    "add_attention_backend_choices",
    "add_deterministic_attention_backend_choices",
    "add_disagg_transfer_backend_choices",
    "add_radix_supported_deterministic_attention_backend_choices",
    "prepare_server_args",
]
