"""Texts of calibration by replay of a captured step, against eager steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_context import get_attn_backend

from kvspec_testkit.runtime.small_decoder import VOCABULARY, SmallDecoder
from sglang_kvspec.adapters import calibration_texts, forward_capture
from sglang_kvspec.adapters.calibration_texts import write_texts
from sglang_kvspec.runtime.ranks import Ranks

COUNT, LENGTH = 16, 60


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner of a small model, without SGLang's groups of ranks."""
    stream = torch.cuda.Stream()

    @contextmanager
    def capturing() -> Iterator[Any]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield SimpleNamespace(stream=stream)

    monkeypatch.setattr(calibration_texts, "graph_capture", capturing)
    alone = SimpleNamespace(barrier=lambda: None)
    monkeypatch.setattr(forward_capture, "get_tp_group", lambda: alone)
    torch.manual_seed(0)
    config = SimpleNamespace(vocab_size=VOCABULARY, hf_config=SimpleNamespace(bos_token_id=1))
    return SimpleNamespace(
        device="cuda",
        model_config=config,
        model=SmallDecoder(get_attn_backend).to("cuda"),
        spec_algorithm=None,
    )


def test_captured_steps_write_the_texts_of_eager_ones(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = write_texts(runner, Ranks(), COUNT, LENGTH)
    monkeypatch.setattr(calibration_texts, "_captured_step", calibration_texts._eager_step)
    eager = write_texts(runner, Ranks(), COUNT, LENGTH)
    # Sums over masked places may round differently, which can change a draw and the rest of a text.
    assert (captured == eager).all(1).float().mean() >= 0.8
    assert len(set(captured[:, -1].tolist())) > 1


def test_the_memory_of_a_capture_is_given_back(runner: Any) -> None:
    held = []
    for _ in range(3):
        write_texts(runner, Ranks(), COUNT, LENGTH)
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    # The first run allocates workspaces of products, which stay.
    assert held[1] == held[2]
