"""A prefill interrupts the pre-launched round before its own forward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

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
