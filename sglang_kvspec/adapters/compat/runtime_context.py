"""Settings that SGLang publishes once for each process."""

from __future__ import annotations

from sglang.srt.runtime_context import get_parallel

try:
    from sglang.srt.runtime_context import get_schedule, get_serving
except ImportError:
    # Until 0.5.16 the settings are fields of ServerArgs.
    from sglang.srt.runtime_context import get_server_args as get_schedule
    from sglang.srt.runtime_context import get_server_args as get_serving

__all__ = ["get_parallel", "get_schedule", "get_serving"]
