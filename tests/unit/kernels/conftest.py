"""Kernels run on a GPU where there is one, else small shapes in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

# Triton looks when it is imported, which importing the tests beside this file does.
INTERPRET = not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """Servers that other tests start must not inherit it."""
    if INTERPRET:
        os.environ.pop("TRITON_INTERPRET", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRET:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
