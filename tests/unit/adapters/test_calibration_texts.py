"""Texts that a model writes at the start, by steps that a GPU captures."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_context import get_attn_backend

from kvspec_testkit.runtime.small_decoder import LAYERS, VOCABULARY, SmallDecoder
from sglang_kvspec.adapters import calibration_texts, forward_capture
from sglang_kvspec.adapters.calibration_texts import StaticTexts, write_texts
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.runtime.ranks import Ranks

COUNT, LENGTH = 3, 12


class StepsWithoutGraphs:
    """A ForwardCapture whose replays launch the step that was to be captured."""

    def __init__(self, runner: Any, max_tokens: int, attn_backend: Any) -> None:
        self._runner, self._attn_backend = runner, attn_backend
        self.logits = torch.full((max_tokens, VOCABULARY), float("nan"))

    def capture(self, rows: StaticTexts, num_tokens: int, stream: Any, warm_ups: int) -> Any:
        addresses = rows.input_ids.data_ptr(), rows.positions.data_ptr()

        def replay() -> None:
            assert addresses == (rows.input_ids.data_ptr(), rows.positions.data_ptr())
            context = calibration_texts.ForwardContext(attn_backend=self._attn_backend)
            with calibration_texts.forward_context(context):
                rows.begin_step(num_tokens)
                batch = SimpleNamespace(input_ids=rows.input_ids, positions=rows.positions)
                logits = calibration_texts.run_model(self._runner, batch)
                rows.end_step(logits)
            self.logits.copy_(logits)

        for _ in range(warm_ups):
            rows.clear()
            # Whatever a warm-up leaves in the caches must not be read later.
            rows.input_ids.fill_(VOCABULARY - 1)
            replay()
        return SimpleNamespace(replay=replay)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner of a small model, whose steps run without graphs where they would be captured."""
    torch.manual_seed(0)
    model = SmallDecoder(get_attn_backend)
    monkeypatch.setattr(
        calibration_texts,
        "decode_batch",
        lambda runner, ids, positions: SimpleNamespace(input_ids=ids, positions=positions),
    )
    monkeypatch.setattr(
        calibration_texts,
        "run_model",
        lambda runner, batch: (
            model.forward(batch.input_ids, batch.positions, batch).next_token_logits
        ),
    )
    monkeypatch.setattr(calibration_texts, "ForwardCapture", StepsWithoutGraphs)
    monkeypatch.setattr(
        calibration_texts, "graph_capture", lambda: nullcontext(SimpleNamespace(stream=None))
    )
    monkeypatch.setattr(calibration_texts, "_mapped", [])
    config = SimpleNamespace(vocab_size=VOCABULARY, hf_config=SimpleNamespace(bos_token_id=1))
    return SimpleNamespace(device="cpu", model_config=config, model=model)


def test_steps_at_fixed_addresses_write_the_same_texts(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = write_texts(runner, Ranks(), COUNT, LENGTH)
    monkeypatch.setattr(calibration_texts, "_eager_step", calibration_texts._captured_step)
    static = write_texts(runner, Ranks(), COUNT, LENGTH)
    assert torch.equal(static, eager)
    # Texts that differ from one another, and depend on their tokens.
    assert len({tuple(text) for text in eager.tolist()}) == COUNT
    assert len(set(eager[0].tolist())) > LAYERS


def test_steps_at_fixed_addresses_give_the_same_logits(runner: Any) -> None:
    ids = torch.randint(VOCABULARY, (LENGTH, COUNT))
    with torch.inference_mode():
        eager = calibration_texts._eager_step(runner, Ranks(), COUNT, LENGTH)
        static = calibration_texts._captured_step(runner, Ranks(), COUNT, LENGTH)
        for place in range(LENGTH):
            torch.testing.assert_close(static(ids[place], place), eager(ids[place], place))


def test_tokens_are_drawn_as_torch_draws_them() -> None:
    logits = torch.randn(COUNT, 1000)
    own, chance = (torch.Generator().manual_seed(5) for _ in range(2))
    for _ in range(3):
        expected = torch.multinomial(logits.softmax(-1), 1, generator=chance)[:, 0]
        assert torch.equal(calibration_texts._draw(logits, own), expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_that_other_ranks_have_mapped_is_kept(runner: Any, num_ranks: int) -> None:
    calibration_texts._captured_step(runner, Ranks(0, num_ranks), COUNT, LENGTH)
    assert len(calibration_texts._mapped) == num_ranks - 1


def test_models_that_cannot_be_captured_are_refused(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StepsWithoutGraphs, "capture", fails)
    with pytest.raises(UnsupportedError, match=r"SmallDecoder.*be captured.*not permitted"):
        calibration_texts._captured_step(runner, Ranks(), COUNT, LENGTH)


def test_memory_that_a_capture_lacks_is_no_fault_of_the_model(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StepsWithoutGraphs, "capture", fails)
    with pytest.raises(torch.OutOfMemoryError):
        calibration_texts._captured_step(runner, Ranks(), COUNT, LENGTH)


def test_captures_use_the_attention_that_they_are_given() -> None:
    runner = SimpleNamespace(attn_backend="the runner's own")
    for given, expected in ((None, "the runner's own"), ("of texts", "of texts")):
        made = forward_capture.ForwardCapture.__new__(forward_capture.ForwardCapture)
        made._runner, made._attn_backend = runner, given
        assert made.attn_backend == expected
