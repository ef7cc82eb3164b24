"""SGLang's batch-invariant operators alone, without the rest of deterministic inference.

A server that has this folder on its path loads it as an SGLang plug-in. Nothing happens without the
variable KVSPEC_INVARIANT_OPERATORS.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Put the operators in force where a server with deterministic inference would."""
    if "KVSPEC_INVARIANT_OPERATORS" not in os.environ:
        return
    from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode
    from sglang.srt.model_executor.model_runner import ModelRunner

    def enable(runner: Any) -> None:
        enable_batch_invariant_mode()

    ModelRunner.maybe_enable_batch_invariant_mode = enable
