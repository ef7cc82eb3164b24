"""Order in which requests are retracted when pages run out.

The lowest priority goes first. Then the fewest retractions: of requests of one priority, none is
retracted twice while another running request was never retracted. Then requests whose residuals are
far, because their next verifications would need the link. Then, as in SGLang, the least output, and
of equal outputs the longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetractionView:
    """Running request to order. priority: higher is kept longer. far_pages: encoded pages whose
    residual is in the store only. near_pages: pages whose residual is in the cache or on its way
    there."""

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
    """Return the indices of requests in the order to keep them: the last is retracted first."""

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
