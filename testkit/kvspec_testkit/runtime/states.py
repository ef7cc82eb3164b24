"""Request states for tests in which only lengths matter."""

from __future__ import annotations

from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams


def request_state(
    rid: str = "r", *, committed_len: int = 64, remaining: int = 100, num_drafts: int = 0
) -> RequestState:
    """Return a greedy request whose tokens are all 0."""
    return RequestState(
        rid=rid,
        committed_len=committed_len,
        pending=0,
        output=[0],
        params=SamplingParams(top_k=1),
        remaining=remaining,
        drafts=[0] * num_drafts,
    )
