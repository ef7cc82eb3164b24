"""The value of --disaggregation-decode-host-receive-threshold that turns it off: 0 in 0.5.21, and 1
since 0.5.22. KVSpec refuses any other."""

from __future__ import annotations

from sglang.srt.server_args import ServerArgs

__all__ = ["host_receive_off"]


def _is_off_at_one() -> bool:
    fields = reversed(getattr(ServerArgs, "__struct_fields__", ()))
    defaults = reversed(getattr(ServerArgs, "__struct_defaults__", ()))
    known = dict(zip(fields, defaults, strict=False))
    return known.get("disaggregation_decode_host_receive_threshold") == 1


if _is_off_at_one():

    def host_receive_off() -> float:
        """Return the threshold at which a decode server never receives KV into host memory."""
        return 1.0

else:

    def host_receive_off() -> float:
        """Return the threshold at which a decode server never receives KV into host memory."""
        return 0.0
