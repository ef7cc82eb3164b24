"""Forwards over SGLang's batch leave the batch as it was."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from sglang_kvspec.adapters import ragged_forward
from sglang_kvspec.adapters.ragged_forward import RaggedForward

EMBEDDED = ("input_embeds", "replace_embeds", "replace_positions")


def test_embeddings_of_a_prefill_are_out_of_sight_of_later_forwards(monkeypatch):
    fields = dict.fromkeys((*ragged_forward._FIELDS, *EMBEDDED), "of the prefill")
    source, seen = SimpleNamespace(**fields), {}

    def build(self, batch, rows, made):
        seen.update(vars(batch.source))
        # A forward batch is made of other values.
        for name in ragged_forward._FIELDS:
            setattr(batch.source, name, "of the forward")
        return "forward batch"

    def generate(batch, *, forward_batch, is_verify):
        assert (batch, forward_batch, is_verify) == (None, "forward batch", True)
        logits = torch.ones(2, 3)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits))

    monkeypatch.setattr(RaggedForward, "_forward_batch", build)
    attention = SimpleNamespace(planned=lambda plan: nullcontext())
    runner = SimpleNamespace(attn_backend=SimpleNamespace(attention=attention))
    worker = SimpleNamespace(model_runner=runner, forward_batch_generation=generate)
    logits = RaggedForward(worker).run(SimpleNamespace(source=source), {})
    assert logits.shape == (2, 3)
    assert {name: seen[name] for name in EMBEDDED} == dict.fromkeys(EMBEDDED)
    assert vars(source) == fields
