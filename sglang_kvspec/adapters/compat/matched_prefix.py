"""The prefix that a request has in the tree: until 0.5.21 matches and requests keep its slots, and
since 0.5.22 its length."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchResult

__all__ = [
    "cache_prefix",
    "load_result",
    "matched_len",
    "matched_slots",
    "prefix_len",
    "prefix_slots",
]


def _keeps_slots() -> bool:
    return "device_indices" in MatchResult._fields


if _keeps_slots():

    def matched_len(match: MatchResult) -> int:
        """Return the number of tokens that a match found in the tree."""
        return len(match.device_indices)

else:

    def matched_len(match: MatchResult) -> int:
        """Return the number of tokens that a match found in the tree."""
        return int(match.device_prefix_len)


if _keeps_slots():

    def matched_slots(tree: Any, match: MatchResult) -> Any:
        """Return the slots of the tokens that a match found in the tree."""
        return match.device_indices

else:

    def matched_slots(tree: Any, match: MatchResult) -> Any:
        """Return the slots of the tokens that a match found in the tree."""
        return tree.path_device_indices(match.last_device_node)


if _keeps_slots():

    def prefix_len(req: Any) -> int:
        """Return the number of tokens of a request that it need not compute."""
        return len(req.prefix_indices)

else:

    def prefix_len(req: Any) -> int:
        """Return the number of tokens of a request that it need not compute."""
        return int(req.prefix_len)


if _keeps_slots():

    def prefix_slots(tree: Any, req: Any) -> Any:
        """Return the slots of the prefix of a request that is not admitted yet."""
        return req.prefix_indices

else:

    def prefix_slots(tree: Any, req: Any) -> Any:
        """Return the slots of the prefix of a request that is not admitted yet."""
        return tree.prefix_device_indices(req)


if _keeps_slots():

    def load_result(slots: Any) -> Any:
        """Return what init_load_back() reports of the slots that it has loaded."""
        return slots

else:

    def load_result(slots: Any) -> Any:
        """Return what init_load_back() reports of the slots that it has loaded."""
        return len(slots)


if _keeps_slots():

    def cache_prefix(tree: Any, req: Any) -> None:
        """Put the prefix of a running request into the tree."""
        computed = req.extend_range
        req.set_extend_range(computed.start, len(req.prefix_indices))
        tree.cache_unfinished_req(req)
        req.set_extend_range(computed.start, computed.end)

else:

    def cache_prefix(tree: Any, req: Any) -> None:
        """Put the prefix of a running request into the tree."""
        tree.checkpoint(req, up_to=req.prefix_len)
