"""Who gives its pages back when they run out.

The lowest priority first; then those that were retracted least often, so that of requests of one
priority none is retracted twice while another that runs was not once; then those whose residuals
are far, whose next verifications would need the link; then, as in SGLang, those with the least
output, and of these the longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetractionView:
    """priority: higher is kept longer. far_pages: encoded pages whose residual is in the store
    only; near_pages: those in the cache or on their way into it."""

    priority: int
    num_retractions: int
    far_pages: int
    near_pages: int
    num_output: int
    num_prompt: int

    @property
    def is_far(self) -> bool:
        return self.far_pages > self.near_pages


def keep_order(requests: Sequence[RetractionView]) -> list[int]:
    """Indices of requests: the last is to be retracted first."""

    def worth(index: int) -> tuple[int, ...]:
        request = requests[index]
        return (
            request.priority,
            request.num_retractions,
            not request.is_far,
            request.num_output,
            -request.num_prompt,
        )

    return sorted(range(len(requests)), key=worth, reverse=True)
