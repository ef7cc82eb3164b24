"""Messages between the processes of a server, which KVSpec checks and splits."""

from __future__ import annotations

from sglang.srt.managers.io_struct import (
    BatchStrOutput,
    BatchTokenIDOutput,
    GenerateReqInput,
    PositionalEmbeds,
    SessionParams,
    unwrap_from_pickle,
    wrap_as_pickle,
)
from sglang.srt.sampling.sampling_params import SamplingParams

__all__ = [
    "BatchStrOutput",
    "BatchTokenIDOutput",
    "GenerateReqInput",
    "PositionalEmbeds",
    "SamplingParams",
    "SessionParams",
    "unwrap_from_pickle",
    "wrap_as_pickle",
]
