"""Forwards of the model over tokens that no scheduler knows."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvspec.adapters.compat.forward import (
    CaptureHiddenMode,
    DpPaddingMode,
    ForwardBatch,
    ForwardMode,
    set_dp_buffer_len,
    set_is_extend_in_batch,
)


def decode_batch(runner: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> ForwardBatch:
    """Return a decode batch with what models read. The attention backend knows where KV is.
    input_ids, positions: int64 [num_tokens]."""
    ones = torch.ones_like(input_ids)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(input_ids),
        input_ids=input_ids,
        req_pool_indices=torch.zeros_like(ones),
        seq_lens=ones,
        seq_lens_cpu=ones.cpu(),
        out_cache_loc=torch.zeros_like(ones),
        seq_lens_sum=len(input_ids),
        orig_seq_lens=ones,
        positions=positions,
        spec_algorithm=runner.spec_algorithm,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        dp_padding_mode=DpPaddingMode.get_default_mode_in_cuda_graph(),
        global_forward_mode=ForwardMode.DECODE,
    )


def run_model(runner: Any, batch: ForwardBatch) -> torch.Tensor:
    """Return logits [num_tokens, vocab]. A forward context with an attention backend must be in
    force."""
    set_dp_buffer_len(None, batch.batch_size, batch.dp_padding_mode.is_max_len(), None)
    set_is_extend_in_batch(False)
    output = runner.model.forward(batch.input_ids, batch.positions, batch)
    logits: torch.Tensor = output.next_token_logits
    return logits
