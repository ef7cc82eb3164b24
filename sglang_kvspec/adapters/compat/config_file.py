"""The reader of --config files, which KVSpec checks before SGLang parses flags."""

from __future__ import annotations

try:
    from sglang.srt.server_args_config_parser import ConfigArgumentMerger
except ModuleNotFoundError:
    # Since 0.5.19.
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

__all__ = ["ConfigArgumentMerger"]
