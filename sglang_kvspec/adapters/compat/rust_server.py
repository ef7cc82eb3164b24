"""SGLANG_RUST_SERVER, which has SGLang take requests in Rust since 0.5.17."""

from __future__ import annotations

from sglang.srt.environ import envs

__all__ = ["rust_server_is_on"]


def _is_known() -> bool:
    return hasattr(envs, "SGLANG_RUST_SERVER")


if _is_known():

    def rust_server_is_on() -> bool:
        """Return True if SGLang's Rust server takes requests."""
        return bool(envs.SGLANG_RUST_SERVER.get())

else:

    def rust_server_is_on() -> bool:
        """Return True if SGLang's Rust server takes requests."""
        return False
