"""The order in which a prefill does its parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters import prefill
from sglang_kvspec.adapters.prefill import Prefill


class ForwardRuns(Exception):
    """Raised when the forward of a prefill begins."""


def test_a_prefill_interrupts_the_round_before_its_forward():
    order, used = [], []

    def planned(plan, *, batch):
        order.append("forward")
        raise ForwardRuns

    parts = SimpleNamespace(
        arrivals=SimpleNamespace(early=None),
        kv=SimpleNamespace(geometry=SimpleNamespace(page_size=64)),
        table=SimpleNamespace(of_request=lambda req, length: torch.tensor([3])),
        guard=SimpleNamespace(fails=lambda req, pages: False),
        config=SimpleNamespace(recent_pages=1),
        pages=SimpleNamespace(note_use=used.extend),
        forward=SimpleNamespace(planned=planned),
    )
    loop = SimpleNamespace(interrupt=lambda: order.append("hold up"))
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="r")], prefix_lens=[0], extend_lens=[5])
    with pytest.raises(ForwardRuns):
        Prefill(parts, loop).run(batch)
    assert [pages.tolist() for pages in used] == [[3]], (
        "pages of a prompt between two chunks would lose their anchors"
    )
    assert order == ["hold up", "forward"]


@pytest.mark.parametrize("remaining", [3, 0])
def test_full_pages_are_encoded_before_a_prompt_is_repeated(monkeypatch, remaining):
    """A GPU's repeats read full pages from records."""
    order = []
    state = SimpleNamespace(remaining=remaining, pending=7, params=None)
    monkeypatch.setattr(prefill, "first_tokens", lambda *_: [SimpleNamespace(tokens=[7])])
    monkeypatch.setattr(prefill, "new_state", lambda *_: state)
    result = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=None))
    parts = SimpleNamespace(
        arrivals=SimpleNamespace(early=None),
        kv=SimpleNamespace(geometry=SimpleNamespace(page_size=64)),
        table=SimpleNamespace(of_request=lambda req, length: torch.tensor([3])),
        guard=SimpleNamespace(fails=lambda req, pages: False),
        config=SimpleNamespace(recent_pages=1, max_draft_len=4),
        pages=SimpleNamespace(
            note_use=list,
            commit=lambda *_: order.append("commit"),
            flush=lambda: order.append("encode"),
        ),
        forward=SimpleNamespace(planned=lambda plan, *, batch: result),
        sampler=None,
        ranks=None,
        counters=None,
        disaggregation=None,
    )
    loop = SimpleNamespace(interrupt=list, score=lambda rows: order.append("score"))
    repeats = SimpleNamespace(run=lambda batch, complete: order.append(f"repeat {complete}"))
    req = SimpleNamespace(rid="r", inflight_middle_chunks=1, retracted_stain=False)
    batch = SimpleNamespace(
        reqs=[req],
        prefix_lens=[0],
        extend_lens=[64],
        return_logprob=False,
        seq_lens=torch.tensor([64]),
    )
    Prefill(parts, loop, repeats).run(batch)
    first = ["commit", "encode", "repeat [0]"] if remaining else ["commit", "repeat []"]
    assert order == [*first, "score", "encode"]
