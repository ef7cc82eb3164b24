"""Base classes of a platform plugin: SGLang documents them, and moves them between releases."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

__all__ = ["CpuDeviceMixin", "PlatformEnum", "SRTPlatform"]
