"""Transfer of a request's KV as a decode server reports it, read from `meta_info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class StreamSeconds(msgspec.Struct, frozen=True):
    """Times of events, in seconds since the prefill ended. None for an event that had not happened
    when the answer was made, or that the mode of transfer does not have."""

    anchors: float | None
    residuals: float | None
    first_verification: float | None


class StreamBytes(msgspec.Struct, frozen=True):
    anchors: int
    residuals: int


class Transfer(msgspec.Struct, frozen=True):
    """Content of meta_info["kvspec"]["transfer"]. prefill_ended_at: seconds since the epoch.
    drafts_s: times of the first verification's drafts, in seconds since the prefill ended.
    accepted_first: number of these drafts, from the first on, that were kept."""

    mode: str
    prefill_ended_at: float
    seconds: StreamSeconds
    drafts_s: tuple[float, ...]
    accepted_first: int
    bytes: StreamBytes

    def __post_init__(self) -> None:
        if not 0 <= self.accepted_first <= len(self.drafts_s):
            raise ValueError(
                f"accepted_first must be from 0 to {len(self.drafts_s)}, the number of drafts, "
                f"got {self.accepted_first}"
            )

    @property
    def drafts_before_residuals(self) -> int:
        """Number of drafts that were made before all residuals arrived. A plain transfer would
        have waited in this time."""
        arrived = self.seconds.residuals
        return 0 if arrived is None else sum(at <= arrived for at in self.drafts_s)

    @property
    def kept_before_residuals(self) -> int:
        return min(self.accepted_first, self.drafts_before_residuals)


class TransferReport(msgspec.Struct, frozen=True):
    """Transfer of one request, and times of its tokens. token_s: when each output token, or each of
    the first, was computed, by a kept draft or a verification; in seconds since the prefill ended.
    """

    transfer: Transfer
    token_s: tuple[float, ...]


def read_transfer_report(meta_info: Mapping[str, Any]) -> TransferReport:
    """Return the report in `meta_info`. Raises ValueError with the name of a missing or invalid
    field."""
    kvspec = meta_info.get("kvspec")
    found = kvspec.get("transfer") if isinstance(kvspec, Mapping) else None
    if found is None:
        raise ValueError(
            "meta_info has no kvspec.transfer: the answer does not come from a decode server"
        )
    fields = {"transfer": found, "token_s": meta_info.get("kvspec_token_s")}
    return msgspec.convert(fields, TransferReport)
