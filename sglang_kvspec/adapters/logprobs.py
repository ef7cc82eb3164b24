"""Log-probabilities of emitted tokens, in the shapes SGLang's result processors read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_kvspec.adapters.compat.batches import LogitsProcessorOutput
from sglang_kvspec.runtime.sampling import SamplingParams, logprobs_of
from sglang_kvspec.runtime.spec_sampler import VerifyResult

_LISTS = (
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "next_token_token_ids_logprobs_idx",
)


def fill_logprobs(
    output: LogitsProcessorOutput,
    batch: Any,
    verified: Sequence[VerifyResult | None],
    params: Sequence[SamplingParams],
    stride: int | None = None,
) -> None:
    """Write the log-probabilities of every emitted token of a batch into `output`.

    verified: what each request emitted, None for nothing; results without logits are left out.
    params: each request's sampling parameters. stride: None after a prefill, when a request emits
    one token. After a decode: rows of each request in flat lists, where entry i * stride + j is
    request i's j-th token and unused entries are empty.
    """
    is_prefill, stride = stride is None, stride or 1
    chosen = torch.zeros(len(verified), stride)
    lists: dict[str, list[Any]] = {
        name: [torch.empty(0)] * (len(verified) * stride) for name in _LISTS
    }
    for i, result in enumerate(verified):
        if result is None or result.logits is None:
            continue
        num_tokens = len(result.tokens)
        logprobs = logprobs_of(result.logits[:num_tokens], params[i])
        # SGLang serialises these to JSON, which has no infinity.
        logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)
        chosen[i, :num_tokens] = logprobs[range(num_tokens), result.tokens].cpu()
        rows = range(i * stride, i * stride + num_tokens)
        for flat, row in zip(rows, logprobs, strict=True):
            # SGLang lets clients ask for a negative number.
            if batch.top_logprobs_nums[i] > 0:
                values, tokens = row.topk(batch.top_logprobs_nums[i])
                lists["next_token_top_logprobs_val"][flat] = values
                lists["next_token_top_logprobs_idx"][flat] = tokens
            if batch.token_ids_logprobs[i] is not None:
                wanted = list(batch.token_ids_logprobs[i])
                lists["next_token_token_ids_logprobs_val"][flat] = row[wanted]
                # SGLang converts the other lists from tensors, but not this one.
                lists["next_token_token_ids_logprobs_idx"][flat] = wanted
    output.next_token_logprobs = chosen[:, 0] if is_prefill else chosen
    if all(req.sampling_params.max_new_tokens == 0 for req in batch.reqs):
        # No token is asked for. As in SGLang, only the other log-probabilities are given.
        # SGLang's own batch.is_prefill_only is never set with speculation.
        output.next_token_logprobs = None
    for name in _LISTS:
        setattr(output, name, lists[name])
