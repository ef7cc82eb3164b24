"""Protocols of attention at the target precision, for prefills, steps and verifications."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from kvspec_kernels.ops.attention import Tail
from sglang_kvspec.core.config import Target
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import TargetRows
from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.step_attention import StepAttention
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize

KV = tuple[torch.Tensor, torch.Tensor]


class CapturedTarget(Protocol):
    """Attention of one captured verification.

    num_parts: rows of a VerifyRows, or parts of rows, that the launches are made for.
    """

    num_parts: int

    def plan(self, rows: TargetRows) -> None:
        """Prepare the replay of a verification that VerifyRows is loaded with. A graph does not
        hold this call, which does not wait for the device."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        """Attend from q [num_tokens, num_qo_heads, head_dim] to the past and, causally, to `tail`.

        Returns a tensor like q, 0 for tokens of no part. A graph holds this call: memory that
        outlives the graph is not allocated, and the device is not waited for.
        """


class TargetVerifications(Protocol):
    """Factory for the attention of captured verifications over one VerifyRows. No two captured
    verifications may be replayed at once."""

    def has_room(self, size: VerifySize) -> bool:
        """Return True if a verification of this size can be captured."""

    def make(self, size: VerifySize) -> CapturedTarget:
        """Make the attention of one size, which has room. Capture it before making the next."""


class TargetAttention(Protocol):
    """Attention of one rank at the target precision. Registered in the entry-point group
    `sglang_kvspec.target_attentions` as a class.

    The constructor takes the rank's GpuKVCache and its number of query heads. It raises
    UnsupportedError for sizes that the kernels do not cover. Softmax scale is 1 / sqrt(head_dim).
    Outputs of all methods agree within rounding, and bit by bit where is_deterministic.

    target: precision of full pages that queries see, a value of --kvspec-target.
    is_deterministic: bits depend neither on batches nor on chunks nor on drafts.
    splits_by_page: each page that a row writes to is a part of its own in TargetRows, which encodes
    the page before later tokens attend. True where queries must see every page but their own from
    its record.
    short_steps_differ: short_step() makes another step than step().
    query_tiles: tokens times query heads of a KV head, ascending, at which a verification's kernel
    changes.
    rows_of_a_pass: tokens times query heads of a KV head for which one pass over a request's KV is
    enough. None if further passes cost little.
    """

    target: ClassVar[Target]
    is_deterministic: ClassVar[bool]
    splits_by_page: ClassVar[bool]
    short_steps_differ: ClassVar[bool]

    @property
    def query_tiles(self) -> tuple[int, ...]: ...

    @property
    def rows_of_a_pass(self) -> int | None: ...

    def __init__(self, kv: GpuKVCache, num_qo_heads: int) -> None: ...

    def plan(self, rows: TargetRows) -> None:
        """Prepare run() for the layers of an eager forward over `rows`, which are on the CPU."""

    def run(self, layer: int, q: torch.Tensor, tail: KV, new: KV) -> torch.Tensor:
        """Attend from q [num_tokens, num_qo_heads, head_dim] to the past and, causally, to `tail`.

        tail: (k, v) of the tail pool, each [slots, page_size, num_kv_heads, head_dim], which holds
        `new` already. new: (k, v) of q's tokens, each [num_tokens, num_kv_heads, head_dim]. Returns
        a tensor like q, not necessarily contiguous.
        """

    def step(self, rows: DraftRows, batch: int) -> StepAttention:
        """Make the attention of a captured step of the first `batch` rows."""

    def short_step(self, rows: DraftRows, batch: int) -> StepAttention:
        """Make the step for short contexts. Without short_steps_differ it is that of step()."""

    def verifications(self, rows: VerifyRows) -> TargetVerifications:
        """Make the factory for captured verifications over `rows`."""
