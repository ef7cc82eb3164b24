"""The reader of --config files, which KVSpec checks before SGLang parses flags."""

from __future__ import annotations

from sglang.srt.server_args_config_parser import ConfigArgumentMerger

__all__ = ["ConfigArgumentMerger"]
