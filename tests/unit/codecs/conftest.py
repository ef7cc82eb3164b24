"""Pages and codecs that several test files use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvspec_testkit.kernels.encoding import make_pages
from sglang_kvspec.codecs import Codec, make_codec

PageMaker = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="session")
def cache_like_pages() -> PageMaker:
    """Return a function that makes K and V pages [num, page_size, heads, head_dim] with properties
    of real caches: channel means far from zero, a few channels ten times larger, and rare extreme
    tokens."""

    def make(
        *,
        num: int = 3,
        page_size: int = 64,
        heads: int = 2,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return make_pages(num, page_size, heads, head_dim, dtype, seed)

    return make


@pytest.fixture(params=["log4", "uniform4"])
def codec_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def codec_of(codec_name: str) -> Callable[..., Codec]:
    """Return make_codec of each codec in turn, by default at page 64 and head 64 in fp32."""

    def make(**overrides: object) -> Codec:
        options = {"target": "int8", "page_size": 64, "head_dim": 64, "dtype": torch.float32}
        return make_codec(codec_name, **(options | overrides))

    return make
