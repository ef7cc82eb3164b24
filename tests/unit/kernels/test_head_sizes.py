"""Drafts and verifications with head sizes that only the target `int8` serves."""

from __future__ import annotations

import pytest

from kvspec_kernels.formats import Log4Settings, Uniform4Settings
from kvspec_testkit.kernels.cases import make_case


@pytest.mark.parametrize("settings", [Uniform4Settings, Log4Settings])
@pytest.mark.parametrize("source", ["anchor", "int8"])
@pytest.mark.parametrize("head_dim", [80, 96, 112])
def test_attention_over_pages_of_64_tokens(check, device, head_dim, source, settings):
    case = make_case(
        [64, 0, 100],
        settings=settings.for_page(64),
        source=source,
        head_dim=head_dim,
        tail_lens=[1, 5, 3],
        device=device,
    )
    check(case)
