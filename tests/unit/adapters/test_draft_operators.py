"""Batch-invariant operators are out of force while drafts are captured, and only then."""

from __future__ import annotations

import pytest

from sglang_kvspec.adapters.compat import batch_invariance
from sglang_kvspec.adapters.draft_operators import draft_operators


class Mode:
    """Stand-in for SGLang's mode, whose operators need a GPU."""

    def __init__(self, *, is_on):
        self.is_on = is_on
        self.changes = 0

    def set_to(self, is_on):
        self.is_on = is_on
        self.changes += 1


@pytest.fixture(params=[True, False], ids=["deterministic", "fast"])
def mode(request, monkeypatch):
    mode = Mode(is_on=request.param)
    for name, replacement in (
        ("is_batch_invariant_mode_enabled", lambda: mode.is_on),
        ("disable_batch_invariant_mode", lambda: mode.set_to(False)),
        ("enable_batch_invariant_mode", lambda: mode.set_to(True)),
    ):
        # The stand-in replaces nothing that SGLang does not have.
        assert callable(getattr(batch_invariance, name))
        monkeypatch.setattr(batch_invariance, name, replacement)
    return mode


def test_drafts_use_ordinary_operators(mode):
    before = mode.is_on
    with draft_operators():
        assert not mode.is_on
    assert mode.is_on == before
    assert mode.changes == (2 if before else 0)


def test_a_failed_capture_restores_the_operators(mode):
    before = mode.is_on
    with pytest.raises(RuntimeError, match="out of memory"), draft_operators():
        raise RuntimeError("out of memory")
    assert mode.is_on == before
