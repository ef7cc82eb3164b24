"""What a decode server's answer says of how its KV came, read from `meta_info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class StreamSeconds(msgspec.Struct, frozen=True):
    """Since the prefill ended; None for what had not happened when the answer was made, or never
    does in a mode of transfer."""

    anchors: float | None
    residuals: float | None
    first_verification: float | None


class StreamBytes(msgspec.Struct, frozen=True):
    anchors: int
    residuals: int


class Transfer(msgspec.Struct, frozen=True):
    """meta_info["kvspec"]["transfer"]. prefill_ended_at: seconds since the epoch. drafts_s: when
    each draft of the first verification was made, in seconds since then, of which the first
    accepted_first were kept."""

    mode: str
    prefill_ended_at: float
    seconds: StreamSeconds
    drafts_s: tuple[float, ...]
    accepted_first: int
    bytes: StreamBytes

    def __post_init__(self) -> None:
        if not 0 <= self.accepted_first <= len(self.drafts_s):
            raise ValueError(f"kept {self.accepted_first} of {len(self.drafts_s)} drafts")

    @property
    def drafts_before_residuals(self) -> int:
        """Made while residuals were on their way: a plain transfer would have waited."""
        arrived = self.seconds.residuals
        return 0 if arrived is None else sum(at <= arrived for at in self.drafts_s)

    @property
    def kept_before_residuals(self) -> int:
        return min(self.accepted_first, self.drafts_before_residuals)


class TransferReport(msgspec.Struct, frozen=True):
    """token_s: when each output token, or each of the first, was computed, as a draft that was
    kept or by a verification; in seconds since the prefill ended."""

    transfer: Transfer
    token_s: tuple[float, ...]


def read_transfer_report(meta_info: Mapping[str, Any]) -> TransferReport:
    """Raises ValueError that names the field where it is missing or is not what it should be."""
    kvspec = meta_info.get("kvspec")
    found = kvspec.get("transfer") if isinstance(kvspec, Mapping) else None
    if found is None:
        raise ValueError("meta_info has no kvspec.transfer: no decode server made this answer")
    fields = {"transfer": found, "token_s": meta_info.get("kvspec_token_s")}
    return msgspec.convert(fields, TransferReport)
