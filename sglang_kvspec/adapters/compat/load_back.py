"""Loads from tiers below the tree: since 0.5.20 SGLang ends if a part of a promised hit comes."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req

__all__ = ["takes_parts"]


def _counts_what_came() -> bool:
    return hasattr(Req, "materialized_host_hit_len")


if _counts_what_came():

    def takes_parts() -> bool:
        """Return True if SGLang goes on with a part of the hit that match_prefix() promised."""
        return False

else:

    def takes_parts() -> bool:
        """Return True if SGLang goes on with a part of the hit that match_prefix() promised."""
        return True
