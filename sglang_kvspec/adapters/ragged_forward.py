"""Forwards of the model over rows of any lengths, through SGLang's worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_kvspec.adapters.compat.batches import GenerationBatchResult
from sglang_kvspec.adapters.compat.forward import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang_kvspec.adapters.spec_inputs import RaggedForwardInput
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.row_tokens import row_tokens
from sglang_kvspec.kv.forward_plan import ForwardPlan, Row
from sglang_kvspec.kv.transfers import sent_together
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens

# Fields of a ScheduleBatch that a ragged forward changes.
_FIELDS = (
    *("forward_mode", "input_ids", "out_cache_loc", "req_pool_indices", "seq_lens"),
    *("seq_lens_cpu", "seq_lens_sum", "spec_info", "return_logprob"),
)
# Fields of a ScheduleBatch that belong to the tokens of its prefill. SGLang leaves some of them set
# behind it, and not every release has all.
_PREFILL_FIELDS = ("input_embeds", "replace_embeds", "replace_positions")


class RaggedForward:
    """The engine's ModelForward over SGLang's target worker."""

    def __init__(self, target_worker: Any) -> None:
        self._target_worker = target_worker

    @property
    def attention(self) -> Any:
        return self._target_worker.model_runner.attn_backend.attention

    def run(
        self, batch: RoundBatch, rows: Mapping[int, Row], made: DraftedTokens | None = None
    ) -> torch.Tensor:
        """Return logits [num_tokens, vocab] of every token. Leaves SGLang's batch as it was."""
        source = batch.source
        of_prefill = [name for name in _PREFILL_FIELDS if hasattr(source, name)]
        kept = {name: getattr(source, name) for name in (*_FIELDS, *of_prefill)}
        for name in of_prefill:
            setattr(source, name, None)
        forward_batch = self._forward_batch(batch, rows, made)
        result = self.planned(ForwardPlan(tuple(rows.values())), forward_batch=forward_batch)
        for name, value in kept.items():
            setattr(source, name, value)
        return result.logits_output.next_token_logits  # type: ignore[no-any-return]

    def planned(
        self, plan: ForwardPlan, *, batch: Any = None, forward_batch: Any = None
    ) -> GenerationBatchResult:
        """Run one of SGLang's batches over the rows of a plan, without sampling. The result has the
        logits of a prefill's last tokens, or of every token."""
        with self.attention.planned(plan):
            return self._target_worker.forward_batch_generation(
                batch, forward_batch=forward_batch, is_verify=True
            )

    def _forward_batch(
        self, batch: RoundBatch, rows: Mapping[int, Row], made: DraftedTokens | None
    ) -> ForwardBatch:
        """Return a TARGET_VERIFY batch of the rows. Changes SGLang's batch."""
        source, laid = batch.source, row_tokens(batch.states, rows)
        device, dtype = source.seq_lens.device, source.seq_lens.dtype
        spans = [(row.start, row.length, row.start + row.length) for row in rows.values()]
        starts, lengths, ends = (list(column) for column in zip(*spans, strict=True))
        ends_here = torch.tensor(ends, dtype=dtype)
        ids, positions, taking_part, seq_lens, extend, prefixes = sent_together(
            device,
            [
                torch.tensor(laid.tokens),
                torch.tensor(laid.positions),
                torch.tensor(list(rows)),
                ends_here,
                torch.tensor(lengths, dtype=torch.int32),
                torch.tensor(starts, dtype=torch.int32),
            ],
        )
        source.forward_mode = ForwardMode.TARGET_VERIFY
        source.input_ids = ids
        if made is not None:
            made.place(source.input_ids, laid.firsts, laid.lasts)
        # Zeros: the attention backend decides where KV goes.
        source.out_cache_loc = torch.zeros(len(laid.tokens), dtype=torch.int64, device=device)
        source.req_pool_indices = source.req_pool_indices[taking_part]
        source.seq_lens, source.seq_lens_cpu = seq_lens, ends_here
        source.seq_lens_sum = sum(ends)
        source.spec_info = RaggedForwardInput(positions)
        # Log-probabilities are computed from verified logits, not by the logits processor.
        source.return_logprob = False
        forward_batch = ForwardBatch.init_new(
            source,
            self._target_worker.model_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        forward_batch.extend_seq_lens, forward_batch.extend_prefix_lens = extend, prefixes
        forward_batch.extend_seq_lens_cpu = lengths
        forward_batch.extend_prefix_lens_cpu = starts
        return forward_batch
